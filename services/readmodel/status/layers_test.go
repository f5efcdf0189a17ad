package status_test

import (
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/readmodel/status"
)

// touching are the reasons that touch what runs on a node, with what its users see then.
var touching = map[commonv1.DriftReason]commonv1.UserState{
	commonv1.DriftReason_DRIFT_REASON_IDENTITY_REVOKED_OR_FENCED: commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED,
	commonv1.DriftReason_DRIFT_REASON_HOST_RUNTIME_DRIFT:         commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED,
	commonv1.DriftReason_DRIFT_REASON_NODE_DISK_FULL:             commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED,
	commonv1.DriftReason_DRIFT_REASON_CLONED_IDENTITY_DETECTED:   commonv1.UserState_USER_STATE_SECURITY_ACTION_REQUIRED,
	commonv1.DriftReason_DRIFT_REASON_TOKEN_REUSE:                commonv1.UserState_USER_STATE_SECURITY_ACTION_REQUIRED,
}

// Each reason, with and without evidence that the workload fails: an active workspace is normal unless the evidence or
// the reason says otherwise. Whether its agent is away makes no difference, and management shows it.
func TestAnActiveWorkspaceOnADriftingNode(t *testing.T) {
	active := &lifecyclev1.Workspace{
		State: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, NodeId: "n", Epoch: 1,
	}
	for _, reason := range append(names.All[commonv1.DriftReason](), 4711) {
		for _, failing := range []bool{false, true} {
			want := max(commonv1.UserState_USER_STATE_NORMAL, touching[reason])
			if failing {
				want = max(want, commonv1.UserState_USER_STATE_TEMPORARY)
			}
			for _, away := range []string{"", "disconnected", "agent_down", "identity_held"} {
				agent := status.AgentStatus{Connected: away == "", Reason: away, Judged: reason}
				got := status.DescribeWorkspace(status.WorkspaceFacts{
					Workspace: active, Agent: agent, Workloads: status.WorkloadStatus{Failing: failing},
				})
				if got != want {
					t.Errorf("%s, failing %t, away %q: %s, want %s", names.Of(reason), failing, away, names.Of(got), names.Of(want))
				}
				layer := status.DescribeLayers(status.LayerFacts{Workspace: active, Agent: agent}).Management
				if (layer.GetState() == readmodelv1.LayerState_LAYER_STATE_AWAY) != (away != "") {
					t.Errorf("%s, away %q: management is %s", names.Of(reason), away, names.Of(layer.GetState()))
				}
			}
		}
	}
}

// An alarm on an identity that still acts touches the workspaces on the node, as the node's own status shows it.
func TestAnAlarmTouchesWhatRunsOn(t *testing.T) {
	facts := status.NodeFacts{
		Identity:  &recoveryv1.NodeIdentity{State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE},
		Gate:      &lifecyclev1.NodeGate{Admitted: true},
		Connected: true,
		Verdict:   &recoveryv1.NodeVerdict{Reason: commonv1.DriftReason_DRIFT_REASON_CLONED_IDENTITY_DETECTED},
	}
	agent := status.DescribeAgent(facts)
	if agent.Reason != "" || agent.Judged != commonv1.DriftReason_DRIFT_REASON_CLONED_IDENTITY_DETECTED {
		t.Errorf("%+v", agent)
	}
	// Silence that is over, and what an agent said before an outage, hold no more.
	facts.Verdict.Reason = commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN
	if agent := status.DescribeAgent(facts); agent.Judged != 0 {
		t.Errorf("%+v", agent)
	}
}

func TestLayers(t *testing.T) {
	at := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	workload := func(name string, phase nodev1.WorkloadPhase, ready, loop bool) *nodev1.WorkloadStatus {
		return &nodev1.WorkloadStatus{Name: name, Phase: phase, Ready: ready, CrashLoop: loop}
	}
	const (
		running = nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING
		backoff = nodev1.WorkloadPhase_WORKLOAD_PHASE_BACKOFF
		exited  = nodev1.WorkloadPhase_WORKLOAD_PHASE_EXITED

		unknown = readmodelv1.LayerState_LAYER_STATE_UNKNOWN
		away    = readmodelv1.LayerState_LAYER_STATE_AWAY
	)
	seen := func(epoch int64, stale bool, workloads ...*nodev1.WorkloadStatus) *nodev1.Observation {
		o := &nodev1.Observation{Epoch: epoch, Workloads: workloads, ObservedAt: timestamppb.New(at)}
		if stale {
			o.StaleSince = timestamppb.New(at.Add(time.Minute))
		}
		return o
	}
	a, b := workload("a", running, true, false), workload("b", running, true, false)
	connected := status.AgentStatus{Connected: true, Since: at}
	gone := status.AgentStatus{Since: at.Add(time.Hour), Reason: "disconnected", Detail: "cannot be reached"}
	for name, c := range map[string]struct {
		agent               status.AgentStatus
		seen                *nodev1.Observation
		management, runtime readmodelv1.LayerState
		since               time.Duration // of the runtime, after at; -1: unset
	}{
		"nothing was ever reported": {connected, nil, readmodelv1.LayerState_LAYER_STATE_CONNECTED, unknown, -1},
		"nothing was ever heard":    {status.AgentStatus{Reason: "disconnected"}, nil, away, unknown, -1},
		"of another epoch": {
			connected, seen(1, false, a, b), readmodelv1.LayerState_LAYER_STATE_CONNECTED, unknown, -1,
		},
		"of other workloads": {
			connected, seen(2, false, workload("c", running, true, false)), readmodelv1.LayerState_LAYER_STATE_CONNECTED,
			unknown, -1,
		},
		"ready": {
			connected, seen(2, false, a, b), readmodelv1.LayerState_LAYER_STATE_CONNECTED,
			readmodelv1.LayerState_LAYER_STATE_READY, 0,
		},
		"one is not reported": {
			connected, seen(2, false, a), readmodelv1.LayerState_LAYER_STATE_CONNECTED,
			readmodelv1.LayerState_LAYER_STATE_RUNNING, 0,
		},
		"one is not ready": {
			connected, seen(2, false, a, workload("b", running, false, false)),
			readmodelv1.LayerState_LAYER_STATE_CONNECTED, readmodelv1.LayerState_LAYER_STATE_RUNNING, 0,
		},
		"one has ended": {
			connected, seen(2, false, a, workload("b", exited, false, false)),
			readmodelv1.LayerState_LAYER_STATE_CONNECTED, readmodelv1.LayerState_LAYER_STATE_STOPPED, 0,
		},
		"one has ended, one loops": {
			connected, seen(2, false, workload("a", exited, false, false), workload("b", backoff, false, true)),
			readmodelv1.LayerState_LAYER_STATE_CONNECTED, readmodelv1.LayerState_LAYER_STATE_CRASH_LOOP, 0,
		},
		"the agent is connected and silent": {
			connected, seen(2, true, a, b), readmodelv1.LayerState_LAYER_STATE_CONNECTED,
			readmodelv1.LayerState_LAYER_STATE_STALE, time.Minute,
		},
		"the agent is gone": {gone, seen(2, false, a, b), away, readmodelv1.LayerState_LAYER_STATE_STALE, time.Hour},
		"a loop, and the agent is gone": {
			gone, seen(2, false, workload("a", backoff, false, true), b), away,
			readmodelv1.LayerState_LAYER_STATE_STALE, time.Hour,
		},
		"gone, and not known since when": {
			status.AgentStatus{Reason: "disconnected"},
			seen(2, false, a, b), away,
			readmodelv1.LayerState_LAYER_STATE_STALE, 0,
		},
		"held, and still heard": {
			status.AgentStatus{Connected: true, Reason: "identity_held", Since: at},
			seen(2, false, a, b), away,
			readmodelv1.LayerState_LAYER_STATE_READY, 0,
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := status.DescribeLayers(status.LayerFacts{Agent: c.agent, Seen: c.seen, Workspace: &lifecyclev1.Workspace{
				State: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, Epoch: 2, NodeId: "n",
				Spec: &lifecyclev1.WorkspaceSpec{
					Workloads: []*nodev1.Workload{{Name: "a"}, {Name: "b"}},
					Placement: commonv1.PlacementDriver_PLACEMENT_DRIVER_STATIC,
				},
				Endpoints: []*lifecyclev1.Endpoint{{Url: "http://x"}},
			}})
			if got.Management.GetState() != c.management || got.Runtime.GetState() != c.runtime {
				t.Errorf("management %s, runtime %s", names.Of(got.Management.GetState()), names.Of(got.Runtime.GetState()))
			}
			if since := got.Runtime.GetSince(); (since == nil) != (c.since < 0) ||
				since != nil && !since.AsTime().Equal(at.Add(c.since)) {
				t.Errorf("the runtime is so since %v", since)
			}
			waits := slices.Contains(got.Management.GetWaiting(), commonv1.OperationKind_OPERATION_KIND_RECREATE)
			if waits != (c.management == away) {
				t.Errorf("waiting: %v", got.Management.GetWaiting())
			}
			// Nothing probes: whatever the others are, the edge is not known.
			if got.Edge.GetState() != unknown {
				t.Errorf("edge %s", names.Of(got.Edge.GetState()))
			}
			for _, layer := range []*readmodelv1.Layer{got.Management, got.Runtime, got.Edge} {
				if layer.GetUserText() == "" {
					t.Errorf("%v tells its user nothing", layer)
				}
			}
		})
	}
	for _, state := range names.All[commonv1.WorkspaceState]() {
		got := status.DescribeLayers(status.LayerFacts{Workspace: &lifecyclev1.Workspace{State: state}})
		over := state == commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED
		if (got.Management == nil) != over || !over && got.Management.GetState() != unknown {
			t.Errorf("%s, without a node: %v", names.Of(state), got)
		}
		if !over && got.Runtime.GetState() != unknown {
			t.Errorf("%s: runtime %v", names.Of(state), got.Runtime)
		}
	}
}

// Each state has its sentence, and those that people have to end tell when to ask again.
func TestFamilies(t *testing.T) {
	texts := map[string]bool{}
	for _, state := range append(names.All[commonv1.UserState](), 77) {
		f := status.FamilyOf(state)
		if f.Text == "" || texts[f.Text] {
			t.Errorf("%s: %q", names.Of(state), f.Text)
		}
		texts[f.Text] = true
		byPeople := state == commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED ||
			state == commonv1.UserState_USER_STATE_SECURITY_ACTION_REQUIRED
		if (f.AskAgain > 0) != byPeople {
			t.Errorf("%s: ask again in %s", names.Of(state), f.AskAgain)
		}
	}
	for state, waits := range map[commonv1.UserState]bool{
		commonv1.UserState_USER_STATE_UNSPECIFIED: false, commonv1.UserState_USER_STATE_NORMAL: false,
		commonv1.UserState_USER_STATE_TEMPORARY: false, commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED: true,
		commonv1.UserState_USER_STATE_SECURITY_ACTION_REQUIRED: true, 77: false,
	} {
		if got := status.RepairOf(state); (got.AskAgain > 0) != waits {
			t.Errorf("%s: %+v", names.Of(state), got)
		}
	}
	if fault.ImpactOf(4711).Family != commonv1.UserState_USER_STATE_NORMAL {
		t.Error("a reason that is not known touches workspaces")
	}
}

// A verdict that is named after a reason that touches nothing has the evidence of one that does beside it.
func TestTheEvidenceThatTouchesMostCounts(t *testing.T) {
	const (
		skew, full = commonv1.DriftReason_DRIFT_REASON_CLOCK_SKEW, commonv1.DriftReason_DRIFT_REASON_NODE_DISK_FULL
		cloned     = commonv1.DriftReason_DRIFT_REASON_CLONED_IDENTITY_DETECTED
		expired    = commonv1.DriftReason_DRIFT_REASON_CERT_EXPIRED
	)
	for _, c := range [][]commonv1.DriftReason{ // what is judged, the verdict's reason, its evidence
		{0},
		{0, 0, cloned},
		{skew, skew},
		{skew, skew, expired},
		{full, expired, skew, full, expired},
		{cloned, full, cloned},
		{cloned, cloned, full},
		{skew, skew, 4711},
		{4711, 4711},
		{full, 4711, full},
	} {
		v := &recoveryv1.NodeVerdict{}
		if len(c) > 1 {
			v.Reason = c[1]
			for _, reason := range c[2:] {
				v.Evidence = append(v.Evidence, &recoveryv1.Evidence{Reason: reason})
			}
		}
		if got := status.Touching(v); got != c[0] {
			t.Errorf("%v: %s", c, names.Of(got))
		}
		if agent := status.DescribeAgent(status.NodeFacts{
			Identity:  &recoveryv1.NodeIdentity{State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE},
			Connected: true, Gate: &lifecyclev1.NodeGate{Admitted: true}, Verdict: v,
		}); agent.Judged != c[0] {
			t.Errorf("%v: the agent's is %s", c, names.Of(agent.Judged))
		}
	}
	if status.Touching(nil) != 0 {
		t.Error("no verdict touches something")
	}
}
