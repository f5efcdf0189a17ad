package dispatch_test

import (
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/testkit"
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
