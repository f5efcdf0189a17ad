package status

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// Layers are the three layers of a workspace. Each is described by its own evidence alone.
type Layers struct {
	Management, Runtime, Edge *readmodelv1.Layer
}

// LayerFacts are the facts from which the layers of a workspace are described.
type LayerFacts struct {
	Workspace *lifecyclev1.Workspace
	Agent     AgentStatus         // of its node; zero if it names none
	Seen      *nodev1.Observation // the last one of its node's agent; nil: none
}

// DescribeLayers returns the layers of a workspace; none of one that is decommissioned. Missing evidence makes a layer
// unknown or stale: it is neither failure nor health.
func DescribeLayers(f LayerFacts) Layers {
	if f.Workspace.GetState() == commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED {
		return Layers{}
	}
	return Layers{Management: management(f), Runtime: runtime(f), Edge: edge(f.Workspace)}
}

func management(f LayerFacts) *readmodelv1.Layer {
	switch {
	case f.Workspace.GetNodeId() == "":
		return &readmodelv1.Layer{
			State:    readmodelv1.LayerState_LAYER_STATE_UNKNOWN,
			UserText: "It has no machine, or not yet.",
		}
	case f.Agent.Connected && f.Agent.Reason == "":
		return &readmodelv1.Layer{
			State: readmodelv1.LayerState_LAYER_STATE_CONNECTED, Since: stamp(f.Agent.Since),
			UserText: "What it runs on can be managed.", Detail: touched(f.Agent.Judged),
		}
	}
	out := &readmodelv1.Layer{
		State: readmodelv1.LayerState_LAYER_STATE_AWAY, Since: stamp(f.Agent.Since),
		UserText: "What it runs on cannot be managed at present; this says nothing of what runs. Operations on it may wait.",
		Detail:   f.Agent.Reason + ": " + f.Agent.Detail, Waiting: waiting(f.Workspace),
	}
	if more := touched(f.Agent.Judged); more != "" {
		out.Detail += "; " + more
	}
	if f.Agent.Connected {
		out.Since = nil // since when it may not act is in the detail, if that is known
	}
	return out
}

// touched returns what a verdict about the node means for the workspace, if it touches it.
func touched(reason commonv1.DriftReason) string {
	if impact := fault.ImpactOf(reason); impact.Family > commonv1.UserState_USER_STATE_NORMAL {
		return names.Of(reason) + " touches it: " + impact.Why
	}
	return ""
}

// waiting returns the operations on an active workspace that cannot be completed while the agent of its node is away.
// Where an instance of its own was launched, the placement ends it without the agent.
func waiting(w *lifecyclev1.Workspace) []commonv1.OperationKind {
	if w.GetState() != commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE ||
		w.GetSpec().GetPlacement() != commonv1.PlacementDriver_PLACEMENT_DRIVER_STATIC {
		return nil
	}
	return []commonv1.OperationKind{
		commonv1.OperationKind_OPERATION_KIND_RECREATE, commonv1.OperationKind_OPERATION_KIND_DECOMMISSION,
	}
}

func runtime(f LayerFacts) *readmodelv1.Layer {
	unknown := func(text string) *readmodelv1.Layer {
		return &readmodelv1.Layer{State: readmodelv1.LayerState_LAYER_STATE_UNKNOWN, UserText: text}
	}
	switch {
	case f.Workspace.GetState() != commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE:
		return unknown("Nothing is known of what runs: the workspace is " + names.Of(f.Workspace.GetState()) + ".")
	case f.Seen == nil || f.Seen.GetEpoch() != f.Workspace.GetEpoch():
		return unknown("Nothing has been reported of what runs.")
	}
	state, since, detail := reported(f.Workspace, f.Seen)
	if state == readmodelv1.LayerState_LAYER_STATE_UNKNOWN {
		return unknown("Nothing has been reported of what runs.")
	}
	silent := f.Seen.GetStaleSince()
	if silent == nil && !f.Agent.Connected {
		silent = cmp.Or(stamp(f.Agent.Since), f.Seen.GetObservedAt())
	}
	if silent != nil {
		return &readmodelv1.Layer{
			State: readmodelv1.LayerState_LAYER_STATE_STALE, Since: silent,
			UserText: "Nothing new has been reported of what runs. It may well run on.",
			Detail:   "last reported: " + names.Of(state) + sinceText(timeOf(since)),
		}
	}
	return &readmodelv1.Layer{State: state, Since: since, UserText: runtimeTexts[state], Detail: detail}
}

var runtimeTexts = map[readmodelv1.LayerState]string{
	readmodelv1.LayerState_LAYER_STATE_READY:      "All of it runs and is ready.",
	readmodelv1.LayerState_LAYER_STATE_RUNNING:    "It runs, and not all of it is ready.",
	readmodelv1.LayerState_LAYER_STATE_CRASH_LOOP: "A workload of it exits again and again.",
	readmodelv1.LayerState_LAYER_STATE_STOPPED:    "A workload of it has ended.",
}

// reported returns the state that an observation shows for the workloads of a workspace, since when, and each that is
// not ready in words. A workload that the spec does not name is left out.
func reported(w *lifecyclev1.Workspace, seen *nodev1.Observation) (
	readmodelv1.LayerState, *timestamppb.Timestamp, string,
) {
	known, ready, crashing, ended := 0, 0, 0, 0
	for _, spec := range w.GetSpec().GetWorkloads() {
		at := slices.IndexFunc(seen.GetWorkloads(),
			func(st *nodev1.WorkloadStatus) bool { return st.GetName() == spec.GetName() })
		if at < 0 {
			continue
		}
		known++
		switch st := seen.GetWorkloads()[at]; st.GetPhase() {
		case nodev1.WorkloadPhase_WORKLOAD_PHASE_STOPPED, nodev1.WorkloadPhase_WORKLOAD_PHASE_EXITED,
			nodev1.WorkloadPhase_WORKLOAD_PHASE_ABSENT:
			ended++
		case nodev1.WorkloadPhase_WORKLOAD_PHASE_UNSPECIFIED, nodev1.WorkloadPhase_WORKLOAD_PHASE_STARTING,
			nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING, nodev1.WorkloadPhase_WORKLOAD_PHASE_BACKOFF:
			if st.GetCrashLoop() {
				crashing++
			} else if st.GetReady() {
				ready++
			}
		}
	}
	detail := fmt.Sprintf("of %d workloads %d are reported, %d ready, %d ended, %d in a crash loop",
		len(w.GetSpec().GetWorkloads()), known, ready, ended, crashing)
	switch since := seen.GetObservedAt(); {
	case known == 0:
		return readmodelv1.LayerState_LAYER_STATE_UNKNOWN, nil, ""
	case crashing > 0:
		return readmodelv1.LayerState_LAYER_STATE_CRASH_LOOP, since, detail
	case ended > 0:
		return readmodelv1.LayerState_LAYER_STATE_STOPPED, since, detail
	case ready == len(w.GetSpec().GetWorkloads()):
		return readmodelv1.LayerState_LAYER_STATE_READY, since, detail
	default:
		return readmodelv1.LayerState_LAYER_STATE_RUNNING, since, detail
	}
}

// edge returns the layer of a workspace's endpoints. Nothing probes them yet, so whether they can be reached is not
// known.
func edge(w *lifecyclev1.Workspace) *readmodelv1.Layer {
	out := &readmodelv1.Layer{
		State:    readmodelv1.LayerState_LAYER_STATE_UNKNOWN,
		UserText: "Whether its endpoints can be reached is not checked.",
		Detail:   fmt.Sprintf("%d endpoints, and nothing probes them", len(w.GetEndpoints())),
	}
	if len(w.GetEndpoints()) == 0 {
		out.UserText, out.Detail = "It has no endpoints.", ""
	}
	return out
}

func stamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

func timeOf(t *timestamppb.Timestamp) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.AsTime()
}
