package dispatch_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// TestTheLatestTaskIsByTheDatabasesClock: replicas whose clocks differ queue the tasks of one step in turn. The ids are
// made by the replicas' clocks.
func TestTheLatestTaskIsByTheDatabasesClock(t *testing.T) {
	k := newKit(t)
	n, run := k.node(), ids.New()
	queue := func(key string) task.Row {
		return k.enqueue(n, func(s *task.Spec) { s.RunID, s.IdempotencyKey = run, key })
	}
	first := queue("step/1")
	if _, err := k.db.OwnerPool().Exec(t.Context(), `UPDATE lifecycle.task
		SET task_id = 'ffffffff-ffff-7fff-bfff-ffffffffffff' WHERE task_id = $1`, first.TaskID); err != nil {
		t.Fatal(err)
	}
	second := queue("step/2")
	var last task.Row
	err := pg.InTx(t.Context(), k.pool, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		last, _, err = task.Latest(ctx, tx, run, "step/")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if last.TaskID != second.TaskID {
		t.Errorf("the latest is %s with key %s", last.TaskID, last.IdemKey)
	}
}
