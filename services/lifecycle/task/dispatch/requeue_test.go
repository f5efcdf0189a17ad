package dispatch_test

import (
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// requeue ends the open tasks at an offset of the clock by the sweep, and queues one of them again.
func (k *kit) requeue(taskID string, at time.Duration) *lifecyclev1.Task {
	k.t.Helper()
	testkit.SetClockOffset(k.db, at)
	if _, err := k.tasks.Sweep(k.t.Context()); err != nil {
		k.t.Fatal(err)
	}
	got, err := k.change(taskID, lifecyclev1.TaskVerb_TASK_VERB_REQUEUE)
	if err != nil || got.GetState() != queued {
		k.t.Fatalf("requeue: %v, %v", got, err)
	}
	return got
}

// Scenario: requeue-while-away. A task whose outcome was unknown is queued again, and then its node comes back with the
// former attempt. One that runs or has run is the task's: no second attempt is offered, and its result counts. Any
// other has had no effect, and can have none once it is cancelled: the next attempt is offered, and the former one's
// result is late evidence.
func TestARequeuedTaskRunsOnce(t *testing.T) {
	for _, tt := range []struct {
		theirs, ends commonv1.TaskState
		keeps        bool
		cancels      int
	}{
		{theirs: running, ends: succeeded, keeps: true},
		{theirs: succeeded, ends: succeeded, keeps: true},
		{theirs: failed, ends: failed, keeps: true},
		{theirs: delivered, ends: cancelled, cancels: 1},
		{theirs: cancelled, ends: cancelled},
		{theirs: unknown, ends: unknown},
	} {
		t.Run(names.Of(tt.theirs), func(t *testing.T) {
			k := newKit(t)
			n := k.node()
			row := k.enqueue(n)
			former := k.lease(n)
			k.delivered(n, former)
			k.session(n, false)
			k.requeue(row.TaskID, 2*time.Minute)
			res := k.ready(n, inFlight(former, tt.theirs))
			if got := res.GetCancel(); len(got) != tt.cancels || len(got) == 1 && got[0].GetAttempt() != 1 {
				t.Errorf("cancels %v, want %d", got, tt.cancels)
			}
			if !tt.keeps {
				if next := k.lease(n); next.GetTaskId() != row.TaskID || next.GetAttempt() != 2 {
					t.Errorf("leased %v", next)
				}
				if !k.result(n, former, tt.ends) {
					t.Error("the former attempt's result is not acknowledged")
				}
				k.wants(row.TaskID, dispatched, 2, 1)
				return
			}
			if again := k.leaseOf(n).GetTasks(); len(again) != 0 {
				t.Errorf("leased %v", again)
			}
			if !k.result(n, former, tt.ends) {
				t.Error("the former attempt's result is not acknowledged")
			}
			k.wants(row.TaskID, tt.ends, 1, 0)
		})
	}
}

// TestEachRequeueGivesATaskItsFirstWindow queues a task again and again: it may wait as long as the first time, also if
// an earlier build has queued it first.
func TestEachRequeueGivesATaskItsFirstWindow(t *testing.T) {
	k := newKit(t)
	testkit.StopClock(k.db)
	n := k.node()
	one, many := k.enqueue(n), k.queue(n)
	former := k.enqueue(n)
	if _, err := k.pool.Exec(t.Context(), `UPDATE lifecycle.task SET start_within = NULL WHERE task_id = $1`,
		former.TaskID); err != nil {
		t.Fatal(err)
	}
	at := time.Duration(0)
	for range 3 {
		at += time.Hour
		for name, taskID := range map[string]string{
			"queued in a transaction": one.TaskID, "queued with others": many.TaskID, "of an earlier build": former.TaskID,
		} {
			got := k.requeue(taskID, at)
			if window := got.GetExpiresAt().AsTime().Sub(got.GetStateAt().AsTime()); window != time.Minute {
				t.Errorf("%s: after %s it may wait %s", name, at, window)
			}
		}
	}
}

// queue queues a task as a probe is queued, for a minute.
func (k *kit) queue(n *node) task.Row {
	k.t.Helper()
	row, isNew, err := k.tasks.Queue(k.t.Context(), k.spec(n, ids.New()))
	if err != nil || !isNew {
		k.t.Fatalf("queue: %v, new %v", err, isNew)
	}
	return row
}
