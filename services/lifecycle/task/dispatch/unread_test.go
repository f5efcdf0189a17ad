package dispatch_test

import (
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// One task of a batch of reports is in a state that this build does not know: the reports of the others are applied.
func TestAnUnknownStateStopsNoOtherReport(t *testing.T) {
	k := newKit(t)
	odd, plain := k.node(), k.node()
	k.enqueue(odd)
	taskOfPlain := k.enqueue(plain)
	refOfOdd, refOfPlain := k.lease(odd), k.lease(plain)
	testkit.WithoutValue(t, commonv1.TaskState_TASK_STATE_FAILED)
	reportOf := func(n *node, ref *nodev1.TaskRef, state commonv1.TaskState) *lifecyclev1.NodeReport {
		return &lifecyclev1.NodeReport{
			NodeId: n.id, NodeInstanceId: n.instance, SessionId: n.session, Generation: n.generation, LedgerId: n.ledger,
			Results: []*nodev1.TaskResult{{Task: ref, State: state}},
		}
	}
	res, err := k.tasks.ReportTasks(t.Context(), &lifecyclev1.ReportTasksRequest{Reports: []*lifecyclev1.NodeReport{
		reportOf(odd, refOfOdd, commonv1.TaskState_TASK_STATE_FAILED),
		reportOf(plain, refOfPlain, commonv1.TaskState_TASK_STATE_SUCCEEDED),
	}})
	if err != nil {
		t.Fatalf("one unknown state refuses the batch: %v", err)
	}
	if acks := res.GetResults()[1].GetAcknowledged(); len(acks) != 1 || acks[0].GetTaskId() != taskOfPlain.TaskID {
		t.Errorf("the other report: %v", res.GetResults()[1])
	}
	k.wants(taskOfPlain.TaskID, commonv1.TaskState_TASK_STATE_SUCCEEDED, 1, 0)
}

// One of two tasks has a value that this build does not know. A lease, the sweep, and reports of attempts above the
// tasks' own go on with the other one. A task of an unknown type is offered as it is stored, and shown so.
func TestAnUnknownValueStopsNoOtherTask(t *testing.T) {
	k := newKit(t)
	reported := testkit.SetAside(t, "task")
	odd, plain := k.node(), k.node()
	ofOdd, ofPlain := k.enqueue(odd, ofType(restart)), k.enqueue(plain)
	lease := &lifecyclev1.LeaseTasksRequest{}
	for _, n := range []*node{odd, plain} {
		lease.Nodes = append(lease.Nodes,
			&lifecyclev1.NodeLease{NodeId: n.id, SessionId: n.session, Generation: n.generation, MaxTasks: 32})
	}
	restore := names.Without(restart)
	defer func() { restore() }()
	res, err := k.tasks.LeaseTasks(t.Context(), lease)
	if err != nil || len(res.GetTasks()) != 2 || reported() != 1 {
		t.Fatalf("%d were reported as the lease gave %v: %v", reported(), res, err)
	}

	// The attempts of both are above what their rows have; of one the state is not known.
	signed := map[string]*nodev1.SignedTask{}
	for _, leased := range res.GetTasks() {
		o := leased.GetOffer()
		signed[leased.GetNodeId()] = &nodev1.SignedTask{
			Envelope: o.GetEnvelope(), Signature: o.GetSignature(), KeyId: o.GetKeyId(),
		}
	}
	k.setBack(ofOdd.TaskID, delivered, 0)
	k.setBack(ofPlain.TaskID, queued, 0)
	restore()
	restore = names.Without(delivered)
	reports := &lifecyclev1.ReportTasksRequest{}
	for n, row := range map[*node]task.Row{odd: ofOdd, plain: ofPlain} {
		reports.Reports = append(reports.Reports, &lifecyclev1.NodeReport{
			NodeId: n.id, NodeInstanceId: n.instance, SessionId: n.session, Generation: n.generation, LedgerId: n.ledger,
			Results: []*nodev1.TaskResult{{
				Task: &nodev1.TaskRef{TaskId: row.TaskID, Attempt: 1}, State: succeeded, Signed: signed[n.id],
			}},
		})
	}
	if _, err := k.tasks.ReportTasks(t.Context(), reports); err != nil {
		t.Fatalf("one unknown state refuses the reports of higher attempts: %v", err)
	}
	restore()
	k.wants(ofOdd.TaskID, delivered, 0, 0)
	k.wants(ofPlain.TaskID, succeeded, 1, 0)
	if n := reported(); n != 2 {
		t.Errorf("%d tasks were reported after the reports", n)
	}

	// The sweep ends two tasks, of which one gets a state that is not known, and one is of an unknown type.
	restore = names.Without(unknown)
	restoreType := names.Without(restart)
	defer restoreType()
	ofPlain = k.enqueue(plain, ofType(restart))
	for _, id := range []string{ofOdd.TaskID, ofPlain.TaskID} {
		if _, err := k.pool.Exec(t.Context(), `UPDATE lifecycle.task SET expires_at = mesh.clock() - interval '1 hour',
				session_epoch = 0 WHERE task_id = $1`, id); err != nil {
			t.Fatal(err)
		}
	}
	k.session(odd, false)
	swept, err := k.tasks.Sweep(t.Context())
	if err != nil || swept.Expired != 1 || swept.Unknown != 0 || reported() != 4 {
		t.Errorf("%d were reported as the sweep ended %+v: %v", reported(), swept, err)
	}
	restore()
	k.wants(ofOdd.TaskID, unknown, 0, 0)
	k.wants(ofPlain.TaskID, expired, 0, 0)
	k.wantHistory(ofPlain.TaskID, "queued", "expired")
	for _, e := range testkit.Events(t, k.pool, `kind = 'task.changed' AND aggregate_id = $1`, ofPlain.TaskID)[1:] {
		var changed lifecyclev1.TaskChanged
		if err := e.Decode(&changed); err != nil {
			t.Fatal(err)
		}
		if got := changed.GetTask(); got.GetType() != 0 || got.GetUnknown() != "workload.restart" {
			t.Errorf("a task of an unknown type is shown as %q of type %s", got.GetUnknown(), got.GetType())
		}
	}
}
