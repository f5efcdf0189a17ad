package task_test

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

// An agent whose ledger has tasks that the database does not know gets no cancels for them until the mode is over.
func TestInRollbackModeASessionIsToldToStopNothing(t *testing.T) {
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
