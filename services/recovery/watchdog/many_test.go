package watchdog_test

import (
	"log/slog"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/services/recovery/watchdog"
)

// manyLost is the number of instances or machines of a fleet that is lost as a whole.
const manyLost = 10_000

// wholeLost makes active workspaces of a placement, each on a node that has no session, and returns the round trips of
// the first round that finds most of them and of the one after it. It checks that the first one engages the brake and
// opens as many rows as the statement open counts, and that the second one changes nothing. A statement that compares
// each row with each other one runs into the timeout.
func wholeLost(t *testing.T, placement, open string, workspaces int) [2]int64 {
	t.Helper()
	k := newKit(t)
	add := func(state string, n int) {
		t.Helper()
		_, err := k.db.OwnerPool().Exec(k.ctx, `
			INSERT INTO recovery.watch_workspace (workspace_id, version, tenant_id, tenant, name, state, state_at, epoch, run_id,
				node_id, placement, register_failures, last_error_code, last_error)
			SELECT gen_random_uuid(), 1, $1, 'acme', 'w' || n, $3, mesh.clock() - interval '1 day', 1, gen_random_uuid()::text,
				gen_random_uuid(), $2, 0, '', '' FROM generate_series(1, $4::int) n`, tenantID("acme"), placement, state, n)
		k.must(err)
	}
	// Nothing is wrong with these, so that single ones that are lost do not engage the brake.
	const well = 40
	add("provisioning", well)
	k.beat()
	k.listen(130 * time.Second)
	pool, counted := k.counted("statement_timeout", "20s")
	cfg := k.cfg
	cfg.FirstRequestAfter = time.Hour
	w, err := watchdog.New(watchdog.Deps{
		Logger: slog.New(slog.DiscardHandler), Pool: pool, Lifecycle: k.owner, Fleet: k.all,
		Policy: policy.Fixed{Set: k.policy}, Replica: ids.New(),
	}, cfg)
	k.must(err)
	// The plans of prepared statements are made while single ones are lost.
	const single = 8
	for range single {
		k.beat()
		add("active", 1)
		round, err := w.RunOnce(k.ctx)
		k.must(err)
		if round.Engaged {
			t.Fatalf("a round with few lost: %+v", round)
		}
	}
	for left := workspaces - single; left > 0; left -= 1000 {
		k.beat() // a replica that is silent for as long as this takes on a busy machine hears of nothing that is lost
		add("active", min(left, 1000))
	}
	var trips [2]int64
	var rows [2]string
	for n := range trips {
		k.beat()
		before := counted.trips.Load()
		round, err := w.RunOnce(k.ctx)
		k.must(err)
		if !round.Engaged {
			t.Fatalf("round %d has not engaged the brake: %+v", n, round)
		}
		trips[n], rows[n] = counted.trips.Load()-before, k.rows()
	}
	if n := k.count(open); n != workspaces {
		t.Errorf("%d of %d are open", n, workspaces)
	}
	n := k.count(`SELECT count(*) FROM recovery.brake WHERE engaged AND affected = $1 AND fleet = $2`, workspaces,
		workspaces+well)
	if n != 1 {
		t.Errorf("the brake does not count %d of %d", workspaces, workspaces)
	}
	if rows[0] != rows[1] {
		t.Error("the second round has locked or written rows")
	}
	return trips
}

// TestAWholeFleetIsLost checks that the first round engages the brake however many are lost at once, and that no round
// makes more round trips for more of them.
func TestAWholeFleetIsLost(t *testing.T) {
	for placement, open := range map[string]string{
		"process": `SELECT count(*) FROM recovery.recovery_record
			WHERE ended_at IS NULL AND withheld_by = 'brake' AND version = 2`,
		"static": `SELECT count(*) FROM recovery.incident WHERE kind = 'machine_unreachable' AND closed_at IS NULL`,
	} {
		t.Run(placement, func(t *testing.T) {
			few, many := wholeLost(t, placement, open, 20), wholeLost(t, placement, open, manyLost)
			if few != many {
				t.Errorf("round trips of two rounds: %d with 20 lost, %d with %d", few, many, manyLost)
			}
		})
	}
}
