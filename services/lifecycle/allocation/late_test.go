package allocation

import (
	"errors"
	"testing"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// Of two releases that are late one is of a run that stands still: the gate of its node is not locked, so that the
// other release fails while a transaction has that gate.
func TestALateReleaseOfAPausedRunLocksNoGate(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	pool, ctx := db.Pool(pg.RoleLifecycle), testkit.Context(t)
	exec := func(sql string, args ...any) {
		t.Helper()
		if _, err := pool.Exec(ctx, sql, args...); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	tenant, late, paused := ids.New(), ids.New(), ids.New()
	exec(`INSERT INTO lifecycle.tenant (id, name) VALUES ($1, 'x')`, tenant)
	for _, id := range []string{late, paused} { // of a workspace, its allocation and its node
		exec(`INSERT INTO lifecycle.node_gate (node_id, name, fence_epoch, admitted) VALUES ($1, 'n', 1, true)`, id)
		exec(`INSERT INTO lifecycle.workspace (id, tenant_id, name, state, epoch)
			VALUES ($1, $2, $1::uuid::text, 'active', 1)`, id, tenant)
		exec(`INSERT INTO lifecycle.allocation (allocation_id, workspace_id, tenant_id, node_id, epoch, state, placement,
				occupancy, release_deadline_at)
			VALUES ($1, $1, $2, $1, 1, 'releasing', 'process', 'cleanup', mesh.clock() - interval '1 hour')`, id, tenant)
	}
	exec(`INSERT INTO lifecycle.saga_run (id, workspace_id, tenant_id, kind, definition, def_version, step_names, epoch,
			state, why_waiting, next_at)
		VALUES ($1, $1, $2, 'decommission', 'decommission', 1, '{a}', 1, 'waiting', 'a test',
			mesh.clock() + interval '1 hour')`, paused, tenant)
	exec(`INSERT INTO lifecycle.run_pause (run_id, since) VALUES ($1, mesh.clock())`, paused)

	lock, err := pool.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = lock.Rollback(ctx) }()
	if _, err := lock.Exec(ctx, `SELECT FROM lifecycle.node_gate WHERE node_id = $1 FOR UPDATE`, paused); err != nil {
		t.Fatal(err)
	}
	failed, ended := 0, make(chan error, 1)
	go func() {
		var err error
		failed, err = FailLate(ctx, pool)
		ended <- err
	}()
	testkit.Eventually(t, testkit.Patience, func() error {
		select {
		case err := <-ended:
			ended <- err
			return nil
		default:
		}
		var waits bool
		if err := pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_stat_activity a
			WHERE a.datname = current_database() AND a.wait_event_type = 'Lock')`).Scan(&waits); err != nil {
			return err
		}
		if waits {
			t.Error("the late release waits for the gate of a node whose run stands still")
			return lock.Rollback(ctx)
		}
		return errors.New("it has not ended")
	})
	if err := <-ended; err != nil || failed != 1 {
		t.Errorf("%d releases failed, %v; want the one whose run goes on", failed, err)
	}
}
