package status

import (
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// WorkspaceFacts are the facts from which a workspace's user state is derived.
type WorkspaceFacts struct {
	Workspace  *lifecyclev1.Workspace
	Stalled    bool        // the step of its run stalls: none of its attempts has succeeded since
	HasStalled bool        // an attempt of a step has, since the workspace last came up
	Agent      AgentStatus // of the node that the workspace names; zero if it names none
	Workloads  WorkloadStatus
}

// TextOf returns what a workspace's user is told of its user state. If a failed workspace failed by its own workload,
// its user is told to correct that, instead of to wait for an operator.
func TextOf(w *lifecyclev1.Workspace, state commonv1.UserState) string {
	if w.GetState() != commonv1.WorkspaceState_WORKSPACE_STATE_FAILED {
		return FamilyOf(state).Text
	}
	switch w.GetLastErrorCode() {
	case names.Of(commonv1.Reason_REASON_WORKLOAD_FAILED), names.Of(commonv1.Reason_REASON_WORKLOAD_CRASH_LOOP):
		return "Its own workload failed. Correct its command, image or environment, and create it under another name, or " +
			"decommission it first; " +
			"`gpuaas workspaces timeline` shows what it printed last, and `gpuaas workspaces actions` what you can do."
	default:
		return FamilyOf(state).Text
	}
}

// DescribeWorkspace returns the state that a workspace's user sees. Drift of its node that touches neither runtime nor
// access leaves it normal: that its agent is away keeps operations waiting, which the layer management shows, and says
// nothing of what runs. A reason that touches what runs gives it the node's state (fault.ImpactOf). A workload that
// fails must be corrected by its tenant, and an agent that is refused as it registers never came up: either keeps the
// workspace from being normal. A workspace that has stalled on its way up is normal again only when it is up: that
// another attempt or another operation began does not show that the cause is gone.
func DescribeWorkspace(f WorkspaceFacts) commonv1.UserState {
	const cancelled = "cancel_requested"
	switch f.Workspace.GetState() {
	case commonv1.WorkspaceState_WORKSPACE_STATE_STUCK:
		return commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED
	case commonv1.WorkspaceState_WORKSPACE_STATE_FAILED:
		if f.Workspace.GetLastErrorCode() == cancelled {
			return commonv1.UserState_USER_STATE_NORMAL // the user asked for the cancellation
		}
		return commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED
	case commonv1.WorkspaceState_WORKSPACE_STATE_RECREATING:
		return commonv1.UserState_USER_STATE_RECOVERING
	case commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING, commonv1.WorkspaceState_WORKSPACE_STATE_CANCELLING,
		commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONING:
		if f.Stalled || f.HasStalled || f.Workspace.GetRegisterFailures() > 0 {
			return commonv1.UserState_USER_STATE_TEMPORARY
		}
	case commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE:
		return ActiveFamily(f.Agent.Judged, f.Workloads.Failing || f.Agent.Reason == ReasonRegisterFailing)
	case commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED,
		commonv1.WorkspaceState_WORKSPACE_STATE_UNSPECIFIED:
	}
	return commonv1.UserState_USER_STATE_NORMAL
}
