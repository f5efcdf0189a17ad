package dispatch_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/task/dispatch"
)

// lockedTask reports whether another transaction has a lock of a task's row.
func (k *kit) lockedTask(ctx context.Context, taskID string) (bool, error) {
	tx, err := k.pool.Begin(ctx)
	if err != nil {
		return false, err
	}
	defer func() { _ = tx.Rollback(ctx) }()
	_, err = tx.Exec(ctx, `SELECT FROM lifecycle.task WHERE task_id = $1 FOR UPDATE NOWAIT`, taskID)
	if failure, ok := errors.AsType[*pgconn.PgError](err); ok && failure.Code == "55P03" {
		return true, nil
	}
	return false, err
}

// TestReportsLockTasksBeforeRuns checks that every task which a report is about is locked before the runs that the
// report wakes, also tasks whose results come late.
func TestReportsLockTasksBeforeRuns(t *testing.T) {
	k := newKit(t)
	n := k.node()
	over := k.enqueue(n)
	late := k.lease(n)
	k.result(n, late, succeeded)
	ended := k.enqueue(n, ofRun(ids.New()))
	ref := k.lease(n)
	woken := 0
	tasks := dispatch.NewServer(dispatch.Deps{
		Logger: testkit.Logger(t), DB: k.pool, Key: k.key, Hub: k.hub, Committed: func() {},
		Wake: func(ctx context.Context, _ pgx.Tx, runs ...string) error {
			woken += len(runs)
			for what, id := range map[string]string{"that ended": ended.TaskID, "whose result came late": over.TaskID} {
				if held, err := k.lockedTask(ctx, id); err != nil || !held {
					t.Errorf("the task %s is locked when its run is woken: %t, %v", what, held, err)
				}
			}
			return nil
		},
	})
	_, err := tasks.ReportTasks(t.Context(), &lifecyclev1.ReportTasksRequest{Reports: []*lifecyclev1.NodeReport{{
		NodeId: n.id, NodeInstanceId: n.instance, SessionId: n.session, Generation: n.generation, LedgerId: n.ledger,
		Results: []*nodev1.TaskResult{{Task: ref, State: succeeded}, {Task: late, State: failed}},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	if woken != 1 {
		t.Errorf("%d runs were woken, want one", woken)
	}
	k.wants(over.TaskID, succeeded, 1, 1)
}

// TestABatchOfSessionsLocksItsTasks: Lock locks what is in flight at all nodes of a batch, and what their agents name,
// and nothing else.
func TestABatchOfSessionsLocksItsTasks(t *testing.T) {
	k := newKit(t)
	first, second, other := k.node(), k.node(), k.node()
	flying, named, elsewhere := k.enqueue(first), k.enqueue(second), k.enqueue(other)
	k.lease(first)
	k.lease(other)
	k.result(second, k.lease(second), succeeded)
	waits := k.enqueue(second)
	k.tx(func(ctx context.Context, tx pgx.Tx) error {
		ready := gate.Ready{NodeIDs: []string{first.id, second.id}, TaskIDs: []string{named.TaskID}}
		busy, err := k.tasks.Lock(ctx, tx, ready)
		if err != nil {
			return err
		}
		if !busy[first.id] || !busy[second.id] || len(busy) != 2 {
			t.Errorf("busy nodes %v, want %s and %s", busy, first.id, second.id)
		}
		for id, want := range map[string]bool{
			flying.TaskID: true, named.TaskID: true, waits.TaskID: false,
			elsewhere.TaskID: false,
		} {
			if held, err := k.lockedTask(ctx, id); err != nil || held != want {
				t.Errorf("task %s is locked: %t, %v; want %t", id, held, err, want)
			}
		}
		return nil
	})
}

// TestWithdrawnTasksAreAnnouncedByTheCommit: agents get the hints to stop the tasks that a cancel withdraws once it is
// committed, without a sweep; a cancel that is rolled back sends none.
func TestWithdrawnTasksAreAnnouncedByTheCommit(t *testing.T) {
	k := newKit(t)
	n := k.node()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	hints := k.watch(ctx)
	k.until(hints, func(*lifecyclev1.WatchWorkResponse) bool { return true }) // the stream is open; nothing sweeps
	run := ids.New()
	k.enqueue(n, ofRun(run))
	ref := k.lease(n)
	withdraw := func(end error) error {
		return pg.InTx(t.Context(), k.pool, func(ctx context.Context, tx pgx.Tx) error {
			return errors.Join(k.tasks.Withdraw(ctx, tx, run, "cancelled"), end)
		})
	}
	undone := errors.New("rolled back")
	if err := withdraw(undone); !errors.Is(err, undone) {
		t.Fatal(err)
	}
	k.hub.Notify(n.id) // its hint comes after any hint of the first one
	cancels := func(m *lifecyclev1.WatchWorkResponse) bool { return len(m.GetCancels()) > 0 }
	k.until(hints, func(m *lifecyclev1.WatchWorkResponse) bool {
		if cancels(m) {
			t.Errorf("told %v of a cancel that was rolled back", m.GetCancels())
		}
		return len(m.GetNodeIds()) > 0
	})
	if err := withdraw(nil); err != nil {
		t.Fatal(err)
	}
	k.until(hints, func(m *lifecyclev1.WatchWorkResponse) bool {
		return cancels(m) && m.GetCancels()[0].GetTask().GetTaskId() == ref.GetTaskId()
	})
}
