package dispatch_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

const (
	deploy = commonv1.TaskType_TASK_TYPE_WORKLOAD_DEPLOY
	diag   = commonv1.TaskType_TASK_TYPE_DIAGNOSTICS_COLLECT
)

// In rollback mode only probes and collections of diagnostics are dispatched; results are applied, and the other tasks
// are dispatched after the mode.
func TestInRollbackModeProbesAloneAreDispatched(t *testing.T) {
	k := newKit(t)
	testkit.StopClock(k.db) // what is leased is offered again after two seconds
	n := k.node()
	before := k.enqueue(n, ofType(deploy))
	ref := k.lease(n)
	if ref.GetTaskId() != before.TaskID {
		t.Fatalf("leased %v", ref)
	}
	k.delivered(n, ref)
	testkit.SetRollback(k.db, true)
	held := k.enqueue(n, ofType(deploy))
	probe, collect := k.enqueue(n), k.enqueue(n, ofType(diag))
	got := map[string]bool{}
	for _, leased := range k.leaseOf(n).GetTasks() {
		got[leased.GetTask().GetTaskId()] = true
	}
	if len(got) != 2 || !got[probe.TaskID] || !got[collect.TaskID] {
		t.Errorf("leased %v; want the probe %s and the diagnostics %s", got, probe.TaskID, collect.TaskID)
	}
	k.wants(held.TaskID, queued, 0, 0)
	if !k.result(n, ref, succeeded) {
		t.Error("a result was not acknowledged")
	}
	k.wants(before.TaskID, succeeded, 1, 0)
	_, err := k.change(held.TaskID, lifecyclev1.TaskVerb_TASK_VERB_CANCEL)
	if !fault.Has(err, commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK) {
		t.Errorf("a cancel was answered %v", err)
	}
	testkit.SetRollback(k.db, false)
	if ref := k.lease(n); ref.GetTaskId() != held.TaskID {
		t.Errorf("leased %v after the mode", ref)
	}
}

// A task that is not dispatched because of the mode does not expire because of it.
func TestInRollbackModeNothingExpiresThatMayNotStart(t *testing.T) {
	k := newKit(t)
	n := k.node()
	run := ids.New()
	held, probe := k.enqueue(n, ofType(deploy), ofRun(run)), k.enqueue(n)
	testkit.SetRollback(k.db, true)
	testkit.SetClockOffset(k.db, 10*time.Minute)
	if _, err := k.tasks.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	k.wants(held.TaskID, queued, 0, 0)
	k.wants(probe.TaskID, expired, 0, 0)
	testkit.SetRollback(k.db, false)
	k.tx(func(ctx context.Context, tx pgx.Tx) error { return task.Extend(ctx, tx, []string{run}, []float64{600}) })
	if _, err := k.tasks.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if ref := k.lease(n); ref.GetTaskId() != held.TaskID {
		t.Errorf("leased %v after the mode", ref)
	}
}

// Scenario: requeue-while-away, in rollback mode. The node comes back with the former attempt of a task that was queued
// again, and has not begun it. Since it is not told to stop, the attempt is the task's: no second one is offered beside
// it, however long it waits, and its result counts. An attempt that has ended without an effect needs no cancel: the
// next one is offered.
func TestInRollbackModeAFormerAttemptIsTheTasks(t *testing.T) {
	for _, tt := range []struct {
		theirs commonv1.TaskState
		keeps  bool
	}{{delivered, true}, {running, true}, {cancelled, false}} {
		t.Run(names.Of(tt.theirs), func(t *testing.T) {
			k := newKit(t)
			n := k.node()
			row := k.enqueue(n)
			former := k.lease(n)
			k.delivered(n, former)
			k.session(n, false)
			k.requeue(row.TaskID, 2*time.Minute)
			testkit.SetRollback(k.db, true)
			if res := k.ready(n, inFlight(former, tt.theirs)); len(res.GetCancel()) != 0 {
				t.Errorf("the agent is told to stop %v", res.GetCancel())
			}
			testkit.SetClockOffset(k.db, 2*time.Minute+5*time.Second) // past what any offer is held back for
			got := k.leaseOf(n).GetTasks()
			if !tt.keeps {
				if len(got) != 1 || got[0].GetTask().GetAttempt() != 2 {
					t.Errorf("leased %v, want the second attempt", got)
				}
				return
			}
			if len(got) != 0 {
				t.Errorf("leased %v beside the former attempt", got)
			}
			k.wants(row.TaskID, tt.theirs, 1, 0)
			k.started(n, former)
			k.wants(row.TaskID, running, 1, 0)
			if !k.result(n, former, succeeded) {
				t.Error("the former attempt's result is not acknowledged")
			}
			k.wants(row.TaskID, succeeded, 1, 0)
		})
	}
}

// An agent whose ledger has tasks that the database does not know gets no cancels for them until the mode is over.
func TestInRollbackModeASessionIsCancelledNothing(t *testing.T) {
	k := newKit(t)
	n := k.node()
	asked := k.enqueue(n, ofType(deploy))
	ref := k.lease(n)
	k.delivered(n, ref)
	if _, err := k.change(asked.TaskID, lifecyclev1.TaskVerb_TASK_VERB_CANCEL); err != nil {
		t.Fatal(err)
	}
	testkit.SetRollback(k.db, true)
	lost := &nodev1.TaskRef{TaskId: ids.New(), Attempt: 1}
	res := k.ready(n, inFlight(lost, running), inFlight(ref, running))
	if len(res.GetCancel()) != 0 {
		t.Errorf("the agent is told to stop %v", res.GetCancel())
	}
	k.wants(asked.TaskID, running, 1, 0)
	// the one that was asked to stop has ended, and its result was lost with the database
	res = k.ready(n, inFlight(lost, running))
	if len(res.GetCancel()) != 0 {
		t.Errorf("the agent is told to stop %v", res.GetCancel())
	}
	k.wants(asked.TaskID, running, 1, 0)
	testkit.SetRollback(k.db, false)
	if res = k.ready(n, inFlight(lost, running), inFlight(ref, running)); len(res.GetCancel()) != 2 {
		t.Errorf("after the mode the agent is told to stop %v, want both", res.GetCancel())
	}
}
