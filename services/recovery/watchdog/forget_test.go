package watchdog_test

import (
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/services/recovery/watchdog"
)

// Scenario: the watchdog has not run for days, or many workspaces end at once. A round forgets one batch of each table,
// and the rounds that follow go on, without a minute between them, until all is forgotten. What is under way stays.
func TestMoreThanOneBatchIsForgottenInSeveralRounds(t *testing.T) {
	k := newKit(t)
	k.beat()
	const batches = 3
	over := (batches-1)*watchdog.ForgottenAtOnce + 200
	fill := func(sql string, args ...any) {
		t.Helper()
		_, err := k.db.OwnerPool().Exec(k.ctx, sql, args...)
		k.must(err)
	}
	const ofWorkspaces = `INSERT INTO recovery.watch_workspace (workspace_id, version, tenant_id, tenant, name, state,
			state_at, epoch, run_id, placement, register_failures, last_error_code, last_error)
		SELECT gen_random_uuid(), 1, $1, 'acme', 'w' || n, $2, mesh.clock() - interval '2 days', 2, 'r' || n, 'process', 0,
			'', '' FROM generate_series(1, $3::int) n`
	fill(ofWorkspaces, tenantID("acme"), "provisioning", over)
	for epoch, state := range []string{"ended", "live"} {
		fill(`INSERT INTO recovery.watch_instance (workspace_id, epoch, version, instance_id, state, placement)
			SELECT w.workspace_id, $1, 1, gen_random_uuid(), $2, 'process' FROM recovery.watch_workspace w`, epoch+1, state)
	}
	fill(ofWorkspaces, tenantID("acme"), "decommissioned", over)
	fill(`INSERT INTO recovery.class_sighting (step, error_code, run_id, workspace_id, tenant_id, error_layer, seen_at)
		SELECT 'Mark active', 'x', n, gen_random_uuid(), $1, 'database', mesh.clock() - interval '2 days'
		FROM generate_series(1, $2::int) n`, tenantID("acme"), over)
	fill(`INSERT INTO recovery.watch_run (run_id, version, workspace_id, tenant_id, kind, state, phase, step, stalled,
			stuck_reason, attempt, attempt_ver, requester, parent_run, cancel_by, error_code, error, error_layer, created_at,
			finished_at)
		SELECT 'over' || n, 1, gen_random_uuid(), $1, 'recreate', 'succeeded', 'do', '', false, '', 1, 1, '', '', '', '', '',
			'', mesh.clock() - interval '2 days', mesh.clock() - interval '2 days' FROM generate_series(1, $2::int) n`,
		tenantID("acme"), over)
	fill(`INSERT INTO recovery.watch_session (session_id, version, node_id, replica_id, generation, serving, since,
			close_reason)
		SELECT gen_random_uuid(), 1, gen_random_uuid(), NULL, 1, false, mesh.clock() - interval '2 days', ''
		FROM generate_series(1, $1::int) n`, over)
	tables := map[string]string{
		"instances":  `SELECT count(*) FROM recovery.watch_instance WHERE state = 'ended'`,
		"workspaces": `SELECT count(*) FROM recovery.watch_workspace WHERE state = 'decommissioned'`,
		"sightings":  `SELECT count(*) FROM recovery.class_sighting`,
		"runs":       `SELECT count(*) FROM recovery.watch_run`,
		"sessions":   `SELECT count(*) FROM recovery.watch_session`,
	}
	for round := range batches + 1 {
		left := max(0, over-round*watchdog.ForgottenAtOnce)
		for what, sql := range tables {
			if got := k.count(sql); got != left {
				t.Errorf("after %d rounds %d %s are left, want %d", round, got, what, left)
			}
		}
		k.round()
	}
	for what, sql := range map[string]string{
		"instances":  `SELECT count(*) FROM recovery.watch_instance WHERE state = 'live'`,
		"workspaces": `SELECT count(*) FROM recovery.watch_workspace WHERE state = 'provisioning'`,
	} {
		if got := k.count(sql); got != over {
			t.Errorf("%d %s that are under way are left, want %d", got, what, over)
		}
	}
}

// TestAnInstanceIsForgottenOnceItsEpochIsOver checks in which order the events of an instance and of its workspace may
// come: the ended instance of an earlier epoch is forgotten, that of the present epoch and one that still runs are not.
func TestAnInstanceIsForgottenOnceItsEpochIsOver(t *testing.T) {
	k := newKit(t)
	k.beat()
	workspace := ids.New()
	exec := func(sql string, args ...any) {
		t.Helper()
		_, err := k.db.OwnerPool().Exec(k.ctx, sql, args...)
		k.must(err)
	}
	instance := func(epoch int, state string) {
		t.Helper()
		exec(`INSERT INTO recovery.watch_instance (workspace_id, epoch, version, instance_id, state, placement)
			VALUES ($1, $2, 1, gen_random_uuid(), $3, 'process')
			ON CONFLICT (workspace_id, epoch) DO UPDATE SET state = EXCLUDED.state`, workspace, epoch, state)
	}
	known := func(what string, want int) {
		t.Helper()
		k.pass(time.Minute + time.Second) // a round forgets again after a minute
		k.beat()
		k.round()
		if got := k.count(`SELECT count(*) FROM recovery.watch_instance`); got != want {
			t.Errorf("%s: %d instances are known, want %d", what, got, want)
		}
	}
	instance(1, "ended")
	known("the workspace is not known", 1)
	exec(`INSERT INTO recovery.watch_workspace (workspace_id, version, tenant_id, tenant, name, state, state_at, epoch,
			run_id, placement, register_failures, last_error_code, last_error)
		VALUES ($1, 1, $2, 'acme', 'w', 'provisioning', mesh.clock(), 2, 'r', 'process', 0, '', '')`,
		workspace, tenantID("acme"))
	known("it is known, in the next epoch", 0)
	instance(2, "live")
	known("its instance runs", 1)
	exec(`UPDATE recovery.watch_workspace SET epoch = 3`)
	known("the next epoch has begun while it runs", 1)
	instance(2, "ended")
	known("it has ended", 0)
	instance(3, "ended")
	known("the instance of the present epoch has ended", 1)
	exec(`UPDATE recovery.watch_workspace SET epoch = 4`)
	known("the epoch after that has begun", 0)
}
