package watchdog_test

import (
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
)

// The tables spell states as the proto enums do.
func TestStatesAreSpelledAsTheirEnums(t *testing.T) {
	k := newKit(t)
	for _, tt := range []struct {
		table, column string
		want          []string
	}{
		{"recovery_record", "trigger", names.Spellings[commonv1.RecoveryTrigger]()},
		{"recovery_record", "outcome", names.Spellings[commonv1.RecoveryOutcome]()},
		{"incident", "kind", names.Spellings[commonv1.IncidentKind]()},
		{"incident", "severity", names.Spellings[commonv1.Severity]()},
		{"watch_workspace", "state", names.Spellings[commonv1.WorkspaceState]()},
		{"watch_run", "state", names.Spellings[commonv1.RunState]()},
		{"watch_instance", "state", names.Spellings[commonv1.InstanceState]()},
	} {
		var text string
		k.must(k.db.OwnerPool().QueryRow(k.ctx, `SELECT pg_get_constraintdef(c.oid) FROM pg_constraint c
			WHERE c.conrelid = ('recovery.' || $1)::regclass
				AND c.conname = $1 || '_' || $2 || '_check'`, tt.table, tt.column).Scan(&text))
		var got []string
		for _, m := range regexp.MustCompile(`'([a-z_0-9]+)'`).FindAllStringSubmatch(text, -1) {
			got = append(got, m[1])
		}
		slices.Sort(got)
		slices.Sort(tt.want)
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s.%s allows %v, the enum has %v", tt.table, tt.column, got, tt.want)
		}
	}
}

// Scenario: the commit of the round that deletes what is over fails. The next round deletes it, and not the first one
// after a minute.
func TestAFailedRoundForgetsInTheNext(t *testing.T) {
	k := newKit(t)
	owner := func(sql string) {
		t.Helper()
		_, err := k.db.OwnerPool().Exec(k.ctx, sql)
		k.must(err)
	}
	owner(`INSERT INTO recovery.class_sighting (step, error_code, run_id, workspace_id, tenant_id, error_layer, seen_at)
		VALUES ('Mark active', 'x', 'r', gen_random_uuid(), gen_random_uuid(), 'database', mesh.clock() - interval '2 days')`)
	owner(`CREATE FUNCTION recovery.fail_at_commit() RETURNS trigger LANGUAGE plpgsql AS
		$$ BEGIN RAISE EXCEPTION 'the commit fails'; END $$`)
	owner(`CREATE CONSTRAINT TRIGGER fail_at_commit AFTER DELETE ON recovery.class_sighting DEFERRABLE INITIALLY DEFERRED
		FOR EACH ROW EXECUTE FUNCTION recovery.fail_at_commit()`)
	if _, err := k.w.RunOnce(k.ctx); err == nil || !strings.Contains(err.Error(), "the commit fails") {
		t.Fatalf("the round whose commit was to fail: %v", err)
	}
	owner(`DROP TRIGGER fail_at_commit ON recovery.class_sighting`)
	k.round()
	if n := k.count(`SELECT count(*) FROM recovery.class_sighting`); n != 0 {
		t.Errorf("%d rows are left", n)
	}
}

// Rows of what has ended are deleted after a while; those of what is under way are not.
func TestForgetting(t *testing.T) {
	k := newKit(t)
	k.up("acme", "live", byProcess, ids.New())
	gone := k.up("acme", "gone", byProcess, ids.New())
	broken := k.provision("acme", "broken", byProcess)
	k.fail(broken, 3, "schema_failed")
	k.lose(gone)
	k.start(gone, commonv1.OperationKind_OPERATION_KIND_DECOMMISSION, ids.New(), "user:ada",
		commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED)
	k.pass(25 * time.Hour)
	k.beat()
	k.cfg.ForgetAfter = 26 * time.Hour
	k.w = k.watchdog("")
	k.round()
	if got := k.count(`SELECT count(*) FROM recovery.watch_workspace`); got != 3 {
		t.Errorf("%d workspaces are kept before their term, want 3", got)
	}
	k.pass(time.Minute) // the lease of the replica before has ended
	k.beat()
	k.cfg.ForgetAfter = 0 // the default
	k.w = k.watchdog("")
	k.round()
	k.round()
	for sql, want := range map[string]int{
		`SELECT count(*) FROM recovery.watch_workspace`: 2,
		`SELECT count(*) FROM recovery.watch_instance`:  1,
		`SELECT count(*) FROM recovery.watch_session`:   1,
		`SELECT count(*) FROM recovery.class_sighting`:  0,
		// the failed workspace's last one: a recreation by hand is measured from it
		`SELECT count(*) FROM recovery.watch_run`:                                  1,
		`SELECT count(*) FROM recovery.recovery_record`:                            0,
		`SELECT count(*) FROM recovery.watchdog_lease`:                             1,
		`SELECT count(*) FROM recovery.watch_workspace w WHERE w.state = 'active'`: 1,
	} {
		if got := k.count(sql); got != want {
			t.Errorf("%s: %d, not %d", sql, got, want)
		}
	}
}

// A round over ten thousand healthy workspaces is short: it is made every second. Other load on the machine may make
// rounds slower, so one quick round is enough.
func TestRoundOverAFleetIsShort(t *testing.T) {
	k := newKit(t)
	k.beat()
	const workspaces, batch = 10000, 1000 // within the role's statement timeout on a slow machine
	for from := 1; from <= workspaces; from += batch {
		_, err := k.db.Pool(pg.RoleRecovery).Exec(k.ctx, `WITH w AS (
				INSERT INTO recovery.watch_workspace
				SELECT gen_random_uuid(), 1, gen_random_uuid(), 't', 'w' || n, 'active', mesh.clock(), 1, 'r' || n,
				md5('node' || n)::uuid, 'process', 0, NULL, '', '' FROM generate_series($1::int, $2) n
				RETURNING workspace_id, node_id),
			i AS (
				INSERT INTO recovery.watch_instance
				SELECT workspace_id, 1, 1, gen_random_uuid(), 'live', 'process', node_id, mesh.clock() FROM w)
			INSERT INTO recovery.watch_session
			SELECT gen_random_uuid(), 1, node_id, $3, 1, true, mesh.clock(), '' FROM w`,
			from, from+batch-1, k.replica)
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := k.db.OwnerPool().Exec(k.ctx,
		`ANALYZE recovery.watch_workspace, recovery.watch_instance, recovery.watch_session`); err != nil {
		t.Fatal(err)
	}
	k.round()
	const rounds = 60
	quickest := time.Hour
	for n := range rounds {
		began := time.Now()
		if out := k.round(); out.Opened != 0 {
			t.Fatalf("%+v", out)
		}
		if quickest = min(quickest, time.Since(began)); n >= 4 && quickest <= time.Second {
			break
		}
	}
	t.Logf("a round over 10000 workspaces took %s", quickest)
	if quickest > time.Second {
		t.Errorf("none of %d rounds took less than %s: one is made every second", rounds, quickest)
	}
}
