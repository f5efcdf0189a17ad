package status

import (
	"slices"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// Impact is how one layer of an active workspace is touched, so that its user state is not normal.
type Impact struct {
	Layer  readmodelv1.ImpactLayer
	Family commonv1.UserState
	Reason string // for people of the operator
	Detail string // what was observed, for people of the operator
	Text   string // what it means, for the workspace's user
	// Since is when the evidence of it was observed; zero: not known.
	Since time.Time
	// Judged is the reason of the verdict from which it follows; unspecified: it follows from something else.
	Judged commonv1.DriftReason
}

// Impacts are the impacts on a workspace.
type Impacts struct {
	Touched []Impact // at most one of each layer
	silent  bool     // the evidence of the runtime is missing
	ours    []commonv1.DriftReason
	masked  bool // a verdict about the control plane holds in place of what the node's own said
}

// Keeps reports whether an impact on a layer that began with a reason has not ended, although the evidence does not
// show it any more: missing evidence shows no health. What follows from a verdict about the node ends with that
// verdict, unless one about the control plane hides it.
func (i Impacts) Keeps(layer readmodelv1.ImpactLayer, reason string) bool {
	return layer == readmodelv1.ImpactLayer_IMPACT_LAYER_RUNTIME && i.silent &&
		(i.masked || reason == ReasonCrashLoop || reason == ReasonWorkloadStopped)
}

// Ours reports whether a reason for which a layer was touched touches nothing now, because many machines have it at
// once.
func (i Impacts) Ours(reason string) bool {
	return slices.ContainsFunc(i.ours, func(r commonv1.DriftReason) bool { return names.Of(r) == reason })
}

// DescribeImpacts returns how the layers of an active workspace are touched, each by its own evidence: the gravest
// family of them is the user state that DescribeWorkspace returns, and a workspace that is normal has none. So a node
// that drifts, that its agent is away, and a verdict about the control plane as a whole make no impact by themselves. A
// workspace in another state has none, because its operation explains what its user sees. Nothing probes the edge yet,
// so that layer is never touched.
func DescribeImpacts(f WorkspaceFacts, layers Layers) Impacts {
	if f.Workspace.GetState() != commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE {
		return Impacts{}
	}
	out := Impacts{masked: ofControlPlane(f.Agent.Judged), ours: f.Agent.Ours}
	if f.Agent.Reason == ReasonRegisterFailing {
		family := ActiveFamily(commonv1.DriftReason_DRIFT_REASON_UNSPECIFIED, true)
		out.Touched = append(out.Touched, Impact{
			Layer: readmodelv1.ImpactLayer_IMPACT_LAYER_MANAGEMENT, Family: family, Reason: f.Agent.Reason,
			Detail: f.Agent.Detail, Text: layers.Management.GetUserText() + " " + FamilyOf(family).Text,
		})
	}
	family := ActiveFamily(f.Agent.Judged, f.Workloads.Failing)
	switch judged := fault.ImpactOf(f.Agent.Judged); {
	case judged.Family > commonv1.UserState_USER_STATE_NORMAL:
		out.Touched = append(out.Touched, Impact{
			Layer: readmodelv1.ImpactLayer_IMPACT_LAYER_RUNTIME, Family: family, Reason: names.Of(f.Agent.Judged),
			Detail: judged.Why, Text: FamilyOf(family).Text, Judged: f.Agent.Judged,
		})
	case f.Workloads.Failing:
		out.Touched = append(out.Touched, Impact{
			Layer: readmodelv1.ImpactLayer_IMPACT_LAYER_RUNTIME, Family: family, Reason: f.Workloads.Reason,
			Detail: f.Workloads.Detail, Text: layers.Runtime.GetUserText() + " " + FamilyOf(family).Text,
			Since: timeOf(layers.Runtime.GetSince()),
		})
	default:
		state := layers.Runtime.GetState()
		out.silent = !f.Agent.Connected || f.Agent.Reason != "" ||
			state == readmodelv1.LayerState_LAYER_STATE_STALE || state == readmodelv1.LayerState_LAYER_STATE_UNKNOWN
	}
	return out
}

// ofControlPlane reports whether a reason is of the verdict about the control plane.
func ofControlPlane(reason commonv1.DriftReason) bool {
	return reason == commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_OUTAGE ||
		reason == commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_ROLLBACK
}
