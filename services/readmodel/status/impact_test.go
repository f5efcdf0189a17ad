package status_test

import (
	"slices"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/services/readmodel/status"
)

// The gravest family of a workspace's impacts is the state that its user sees, whatever is known of it, and no layer
// has two impacts.
func TestImpactsAddUpToTheUserState(t *testing.T) {
	touched := 0
	for number := range commonv1.DriftReason_name {
		for _, failing := range []bool{false, true} {
			for _, agent := range []status.AgentStatus{
				{Connected: true}, {Reason: status.ReasonDisconnected}, {Reason: status.ReasonRegisterFailing},
			} {
				agent.Judged = commonv1.DriftReason(number)
				f := status.WorkspaceFacts{
					Agent: agent, Workloads: status.WorkloadStatus{Failing: failing, Reason: status.ReasonCrashLoop},
					Workspace: &lifecyclev1.Workspace{State: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, NodeId: "n"},
				}
				layers := status.DescribeLayers(status.LayerFacts{Workspace: f.Workspace, Agent: agent})
				gravest, seen := commonv1.UserState_USER_STATE_NORMAL, []readmodelv1.ImpactLayer(nil)
				for _, i := range status.DescribeImpacts(f, layers).Touched {
					if i.Family <= commonv1.UserState_USER_STATE_NORMAL || i.Reason == "" || i.Text == "" ||
						slices.Contains(seen, i.Layer) {
						t.Errorf("%+v of %+v", i, f)
					}
					gravest, seen = max(gravest, i.Family), append(seen, i.Layer)
					touched++
				}
				if want := status.DescribeWorkspace(f); gravest != want {
					t.Errorf("%+v: the impacts make it %s, and its user sees %s", f, gravest, want)
				}
				f.Workspace.State = commonv1.WorkspaceState_WORKSPACE_STATE_RECREATING
				if more := status.DescribeImpacts(f, layers).Touched; len(more) > 0 {
					t.Errorf("an operation goes on: %+v", more)
				}
			}
		}
	}
	if touched < 50 {
		t.Errorf("only %d impacts were made", touched)
	}
}

// Missing evidence keeps what a workload did, and not what a verdict said that is over.
func TestWhatMissingEvidenceKeeps(t *testing.T) {
	const runtime = readmodelv1.ImpactLayer_IMPACT_LAYER_RUNTIME
	of := func(agent status.AgentStatus) status.Impacts {
		w := &lifecyclev1.Workspace{State: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, NodeId: "n"}
		return status.DescribeImpacts(status.WorkspaceFacts{Workspace: w, Agent: agent},
			status.Layers{Runtime: &readmodelv1.Layer{State: readmodelv1.LayerState_LAYER_STATE_READY}})
	}
	away, heard := of(status.AgentStatus{Reason: status.ReasonDisconnected}), of(status.AgentStatus{Connected: true})
	outage := of(status.AgentStatus{Judged: commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_OUTAGE})
	if !away.Keeps(runtime, status.ReasonCrashLoop) || !away.Keeps(runtime, status.ReasonWorkloadStopped) ||
		away.Keeps(runtime, "node_disk_full") || away.Keeps(readmodelv1.ImpactLayer_IMPACT_LAYER_MANAGEMENT,
		status.ReasonRegisterFailing) {
		t.Error("silence of the agent")
	}
	if heard.Keeps(runtime, status.ReasonCrashLoop) || !outage.Keeps(runtime, "node_disk_full") {
		t.Error("evidence, or an outage")
	}
}
