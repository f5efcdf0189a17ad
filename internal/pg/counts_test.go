package pg_test

import (
	"context"
	"errors"
	"testing"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pg/migrations"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestWorkspacesAreCountedBesideABatch checks that the migration which begins to count workspaces waits for a batch of
// projections that is under way, in whichever order it writes, and that neither waits for a lock of the other.
func TestWorkspacesAreCountedBesideABatch(t *testing.T) {
	testkit.IO(t)
	file, err := migrations.FS.ReadFile("00225_workspace_counts.sql")
	if err != nil {
		t.Fatal(err)
	}
	d := testkit.DB(t)
	ctx := testkit.Context(t)
	const cursor = `INSERT INTO readmodel.event_cursor (name, pos) VALUES ('projections', 0) ON CONFLICT DO NOTHING`
	if _, err := d.OwnerPool().Exec(ctx, cursor); err != nil {
		t.Fatal(err)
	}
	for _, order := range [][]string{{"run", "workspace"}, {"workspace", "run"}} {
		if _, err := d.OwnerPool().Exec(ctx, `
			DROP FUNCTION readmodel.count_workspace_insert(), readmodel.count_workspace_update(),
				readmodel.count_workspace_delete(), readmodel.count_run_insert(), readmodel.count_run_update(),
				readmodel.count_run_delete() CASCADE;
			DROP FUNCTION readmodel.recount_workspaces();
			DROP TABLE readmodel.workspace_count`); err != nil {
			t.Fatal(err)
		}
		batch, err := d.Pool(pg.RoleReadmodel).Begin(ctx)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = batch.Rollback(context.WithoutCancel(ctx)) })
		write := func(sql string) {
			t.Helper()
			if _, err := batch.Exec(ctx, sql); err != nil {
				t.Fatalf("a batch that writes %v: %v", order, err)
			}
		}
		write(`SELECT pos FROM readmodel.event_cursor WHERE name = 'projections' FOR UPDATE SKIP LOCKED`)
		write(`UPDATE readmodel.` + order[0] + ` SET version = version`)
		ended := make(chan error, 1)
		go func() {
			_, err := d.OwnerPool().Exec(ctx, string(file))
			ended <- err
		}()
		testkit.Eventually(t, testkit.Patience, func() error {
			var waits bool
			err := d.OwnerPool().QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_stat_activity
				WHERE datname = current_database() AND wait_event_type = 'Lock')`).Scan(&waits)
			if err == nil && !waits {
				err = errors.New("the migration does not wait for the batch")
			}
			return err
		})
		write(`UPDATE readmodel.` + order[1] + ` SET version = version`)
		if err := batch.Commit(ctx); err != nil {
			t.Fatal(err)
		}
		if err := <-ended; err != nil {
			t.Errorf("the migration beside a batch that writes %v: %v", order, err)
		}
	}
}
