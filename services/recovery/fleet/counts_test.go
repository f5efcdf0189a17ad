package fleet

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestMain removes the databases of the tests.
func TestMain(m *testing.M) { testkit.Main(m) }

// counted is what loadUnits reads, made of the rows.
const counted = `
	SELECT w.placement, count(DISTINCT CASE WHEN w.placement = 'static' AND w.node_id IS NOT NULL THEN w.node_id
		ELSE w.workspace_id END)::int AS units, count(*)::int AS instances
	FROM recovery.watch_workspace w WHERE w.state IN ('provisioning', 'active', 'recreating')
		OR EXISTS (SELECT FROM recovery.recovery_record c WHERE c.workspace_id = w.workspace_id AND c.ended_at IS NULL
			AND w.state <> 'decommissioned')
	GROUP BY w.placement`

// TestTheFleetIsCountedAsItsRowsAre checks that the counts equal the rows whatever is written of workspaces, one at a
// time or several, and whatever is being recovered.
func TestTheFleetIsCountedAsItsRowsAre(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	pool := db.Pool(pg.RoleRecovery)
	random := rand.New(rand.NewPCG(7, 11))
	pick := func(of ...string) string { return of[random.IntN(len(of))] }
	state := func() string {
		return pick("provisioning", "active", "active", "failed", "recreating", "decommissioning", "decommissioned")
	}
	var machines, workspaces []string
	for range 4 {
		machines = append(machines, ids.New())
	}
	exec := func(sql string, args ...any) {
		t.Helper()
		if _, err := pool.Exec(ctx, sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	for round := range 300 {
		var machine *string
		if random.IntN(4) > 0 {
			machine = &machines[random.IntN(len(machines))]
		}
		switch what := random.IntN(10); {
		case what < 3 || len(workspaces) == 0:
			workspaces = append(workspaces, ids.New())
			exec(`INSERT INTO recovery.watch_workspace (workspace_id, version, tenant_id, tenant, name, state, state_at, epoch,
				run_id, node_id, placement,
				register_failures, last_error_code, last_error)
					VALUES ($1, 1, gen_random_uuid(), 'acme', $2, $3, mesh.clock(), 1, '', $4, $5, 0, '', '')`,
				workspaces[len(workspaces)-1], fmt.Sprint("w", round), state(), machine, pick("static", "process"))
		case what < 7:
			exec(`UPDATE recovery.watch_workspace SET state = $2, node_id = $3, version = version + 1 WHERE workspace_id = $1`,
				workspaces[random.IntN(len(workspaces))], state(), machine)
		case what == 7: // several with one statement
			exec(`UPDATE recovery.watch_workspace SET node_id = $1, state = $2, placement = $3
				WHERE abs(hashtext(workspace_id::text)) % 5 = $4`,
				machine, state(), pick("static", "process"), random.IntN(5))
		case what == 8:
			exec(`INSERT INTO recovery.recovery_record (record_id, workspace_id, workspace, tenant_id, trigger, outcome, step,
				error_code, cause,
				detected_at, user_impact, correlation_id, unit, placement, run_id)
					VALUES (gen_random_uuid(), $1, '', gen_random_uuid(), 'manual', 'open',
				'', '', '', mesh.clock(), '', '', '', '', '') ON CONFLICT DO NOTHING`, workspaces[random.IntN(len(workspaces))])
		default:
			exec(`DELETE FROM recovery.watch_workspace WHERE abs(hashtext(workspace_id::text)) % 17 = $1`, random.IntN(17))
		}
		rows, err := pool.Query(ctx, counted)
		if err != nil {
			t.Fatal(err)
		}
		list, err := pgx.CollectRows(rows, pgx.RowToStructByName[fleetCount])
		if err != nil {
			t.Fatal(err)
		}
		var units int32
		want := map[string]int32{}
		for _, row := range list {
			units += row.Units
			want[row.Placement] = row.Instances
		}
		got := Round{}
		if err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			got.tx = tx
			_, err := got.Units(ctx)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		if got.units != units || !maps.Equal(got.instances, want) {
			t.Fatalf("after %d changes: %d units and %v are counted, and there are %d and %v", round+1, got.units, got.instances,
				units,
				want)
		}
	}
	var left int
	if err := pool.QueryRow(ctx, `SELECT count(*) FROM recovery.watch_machine m WHERE m.workspaces <> (
		SELECT count(*) FROM recovery.watch_workspace w
		WHERE w.node_id = m.node_id AND w.placement = 'static'
			AND w.state IN ('provisioning', 'active', 'recreating'))`).Scan(&left); err != nil {
		t.Fatal(err)
	}
	if left > 0 {
		t.Errorf("%d machines are counted with other workspaces than they have", left)
	}
}

// insertUp inserts a workspace that is to be up.
const insertUp = `INSERT INTO recovery.watch_workspace (workspace_id, version, tenant_id, tenant, name, state, state_at,
	epoch, run_id, node_id, placement, register_failures, last_error_code, last_error)
	VALUES (gen_random_uuid(), 1, gen_random_uuid(), 'acme', 'one', 'active', mesh.clock(), 1, '', $1, $2, 0, '', '')`

// wantFleet requires that the counts are so many units, and so many instances of each placement.
func wantFleet(ctx context.Context, t *testing.T, pool *pgxpool.Pool, units int32, instances map[string]int32) {
	t.Helper()
	if err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		r := Round{tx: tx}
		got, err := r.Units(ctx)
		if err == nil && (got != units || !maps.Equal(r.instances, instances)) {
			t.Errorf("%d units and %v are counted, want %d and %v", got, r.instances, units, instances)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

// TestCountsThatDifferAreMadeAnew: counts that differ are made anew, whatever has changed them, with an entry in the
// audit log each time.
func TestCountsThatDifferAreMadeAnew(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	pool, machine := db.Pool(pg.RoleRecovery), ids.New()
	exec := func(sql string, args ...any) {
		t.Helper()
		if _, err := pool.Exec(ctx, sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	compare := func(want CountDifference) {
		t.Helper()
		if got, err := RepairCounts(ctx, pool, testkit.Logger(t)); err != nil || got != want {
			t.Errorf("found %+v, %v, want %+v", got, err, want)
		}
		wantFleet(ctx, t, pool, 4, map[string]int32{"static": 4, "process": 1})
	}
	for _, node := range []*string{&machine, &machine, nil} {
		exec(insertUp, node, "static")
	}
	exec(insertUp, ids.New(), "static")
	exec(insertUp, machine, "process")
	compare(CountDifference{Kept: 4, Counted: 4})
	exec(`UPDATE recovery.watch_count SET units = units + 5 WHERE placement = 'static'`)
	compare(CountDifference{Placements: 1, Kept: 9, Counted: 4})
	exec(`DELETE FROM recovery.watch_count`)
	exec(`UPDATE recovery.watch_machine SET workspaces = 1`)
	compare(CountDifference{Placements: 2, Machines: 1, Counted: 4})
	exec(`DELETE FROM recovery.watch_machine`)
	exec(`INSERT INTO recovery.watch_machine (node_id, workspaces) VALUES ($1, 3)`, ids.New())
	compare(CountDifference{Machines: 3, Kept: 4, Counted: 4})
	compare(CountDifference{Kept: 4, Counted: 4})
	if entries := testkit.Events(t, pool, "kind = 'audit.recorded'"); len(entries) != 3 {
		t.Errorf("%d entries of the audit log, want 3", len(entries))
	}
}

// TestOneMachineIsCountedOnceByTwoTransactions that put a workspace on it at once, and by a count of all that comes
// while one of them is open.
func TestOneMachineIsCountedOnceByTwoTransactions(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	pool, machine := db.Pool(pg.RoleRecovery), ids.New()
	first, err := pool.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer first.Rollback(context.WithoutCancel(ctx)) // it is committed below
	if _, err := first.Exec(ctx, insertUp, machine, "static"); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 2)
	for _, sql := range []string{`SELECT recovery.recount_fleet()`, insertUp} {
		args := []any{machine, "static"}
		if sql != insertUp {
			args = nil
		}
		go func() {
			_, err := pool.Exec(ctx, sql, args...)
			ended <- err
		}()
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		var waiting int
		err := pool.QueryRow(ctx, `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock'`).Scan(&waiting)
		if err == nil && waiting != 2 {
			err = fmt.Errorf("%d wait for the first", waiting)
		}
		return err
	})
	if err := first.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	wantFleet(ctx, t, pool, 1, map[string]int32{"static": 2})
	if got, err := RepairCounts(ctx, pool, testkit.Logger(t)); err != nil || got.Placements+got.Machines != 0 {
		t.Errorf("found %+v, %v", got, err)
	}
}
