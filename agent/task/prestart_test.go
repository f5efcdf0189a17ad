package task_test

import (
	"testing"

	"github.com/gpuaas/mesh/agent/ledger"
	"github.com/gpuaas/mesh/agent/task"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/envelope"
)

// Scenario: cancel-before-offer. The task ends as cancelled, on disk, without a run; its other attempts are not
// touched.
func TestCancelBeforeOffer(t *testing.T) {
	g := newGate()
	close(g.leave)
	b := newBench(t, map[commonv1.TaskType]task.Handler{deploy: g})
	b.run()
	tk := b.task(deploy, &nodev1.WorkloadDeploy{})
	if err := b.exec.Cancel(&nodev1.TaskCancel{Task: &nodev1.TaskRef{TaskId: tk.TaskID, Attempt: 1}}); err != nil {
		t.Fatal(err)
	}
	b.offer(tk)
	b.want(tk.TaskID, cancelled, commonv1.Reason_REASON_CANCEL_REQUESTED)
	e, ok, err := b.led.Get(ledger.Key{TaskID: tk.TaskID, Attempt: 1})
	if err != nil || !ok || e.State != ledger.StateFinished || e.Outcome != cancelled {
		t.Errorf("the ledger holds %v %v, %v", e.State, e.Outcome, err)
	}
	if !b.sink.has(&b.sink.delivered, tk.TaskID) || b.sink.has(&b.sink.started, tk.TaskID) || len(g.entered) != 0 {
		t.Error("it was not delivered, or it was started")
	}
	// The same offer again gets the stored result.
	b.offer(tk)
	if r := b.result(tk.TaskID, 2); r.GetState() != cancelled {
		t.Errorf("offered again: %v", r)
	}
	next := tk
	next.Attempt = 2
	b.offer(next)
	if r := b.result(tk.TaskID, 3); r.GetState() != succeeded || r.GetTask().GetAttempt() != 2 {
		t.Errorf("the next attempt: %v", r)
	}
}

// One frame may name many tasks: all of them end as cancelled.
func TestCancelOfMany(t *testing.T) {
	g := newGate()
	close(g.leave)
	b := newBench(t, map[commonv1.TaskType]task.Handler{deploy: g})
	b.run()
	first, second := b.task(deploy, &nodev1.WorkloadDeploy{}), b.task(deploy, &nodev1.WorkloadDeploy{})
	third := b.task(deploy, &nodev1.WorkloadDeploy{})
	err := b.exec.Cancel(&nodev1.TaskCancel{
		Task: &nodev1.TaskRef{TaskId: first.TaskID, Attempt: 1},
		More: []*nodev1.TaskRef{{TaskId: second.TaskID, Attempt: 1}, {TaskId: third.TaskID, Attempt: 1}},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, tk := range []envelope.Task{first, second, third} {
		b.offer(tk)
		b.want(tk.TaskID, cancelled, commonv1.Reason_REASON_CANCEL_REQUESTED)
	}
	if len(g.entered) != 0 {
		t.Error("one of them was started")
	}
}
