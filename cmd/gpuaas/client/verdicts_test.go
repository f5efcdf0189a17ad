package client_test

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/shown"
)

func verdicts() []*recoveryv1.VerdictPeriod {
	return []*recoveryv1.VerdictPeriod{
		{
			NodeId: nodeID, Reason: commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN, Version: 7,
			Severity: commonv1.Severity_SEVERITY_P1, ObservedAt: at(20), DetectedAt: at(21), CorrelationId: "c-2",
		},
		{
			NodeId: nodeID, Reason: commonv1.DriftReason_DRIFT_REASON_CLONED_IDENTITY_DETECTED, Version: 5,
			Severity: commonv1.Severity_SEVERITY_P0, ObservedAt: at(10), DetectedAt: at(10), EndedAt: at(14),
			CorrelationId: "c-1",
		},
	}
}

// Scenario: the details of a node of which something is wrong have the verdict, each part by itself; those of a healthy
// node have nothing of it but since when it is stale.
func TestADetailedNodeHasItsVerdict(t *testing.T) {
	f := mesh(t)
	n := node()
	n.VerdictStaleSince = at(30)
	n.Verdict = &recoveryv1.NodeVerdict{
		NodeId: nodeID, Reason: commonv1.DriftReason_DRIFT_REASON_NODE_AGENT_UNREACHABLE,
		UserState: commonv1.UserState_USER_STATE_TEMPORARY, Severity: commonv1.Severity_SEVERITY_P1,
		Owner: "agent / host", NextAction: "look at the host", ObservedAt: at(20), DetectedAt: at(21),
		DetectWithin: durationpb.New(2 * time.Minute), RecoverWithin: durationpb.New(5 * time.Minute),
		Evidence: []*recoveryv1.Evidence{
			{
				Part: commonv1.DriftPart_DRIFT_PART_PROCESS, Reason: commonv1.DriftReason_DRIFT_REASON_DISCONNECTED,
				Source: commonv1.EvidenceSource_EVIDENCE_SOURCE_SESSION, ObservedAt: at(20), Detail: "closed",
			},
			{
				Part: commonv1.DriftPart_DRIFT_PART_HOST, Reason: commonv1.DriftReason_DRIFT_REASON_CLOCK_SKEW,
				Source: commonv1.EvidenceSource_EVIDENCE_SOURCE_HOST, ObservedAt: at(19),
			},
		},
		Missing: []string{"whether the process lives", "whether the host answers"},
	}
	always(f, "GetNode", &readmodelv1.GetNodeResponse{Node: n})
	got := call(t, "nodes", "get", "node-1").wants(t, 0).out
	for _, line := range []string{
		"verdict: reason\tnode_agent_unreachable", "verdict: family\ttemporary", "verdict: severity\tP1",
		"verdict: owner\tagent / host",
		"verdict: since\tobserved 2026-01-02T03:04:20.500Z, detected 2026-01-02T03:04:21.500Z",
		"verdict: budgets\tdetect within 2m0s, recover within 5m0s", "verdict: next action\tlook at the host",
		"verdict: evidence\tsession, process: disconnected 2026-01-02T03:04:20.500Z closed",
		"host, host: clock_skew 2026-01-02T03:04:19.500Z", "verdict: missing\twhether the process lives",
		"whether the host answers", "verdict: stale since\t2026-01-02T03:04:30.500Z",
	} {
		if !strings.Contains(got, line) {
			t.Errorf("%q is missing in\n%s", line, got)
		}
	}
	n.Verdict.RecoverWithin = nil
	if got = call(t, "nodes", "get", "node-1").wants(t, 0).out; !strings.Contains(got,
		"detect within 2m0s, a person decides on the recovery") {
		t.Errorf("without a budget of the recovery:\n%s", got)
	}
	n.Verdict = &recoveryv1.NodeVerdict{NodeId: nodeID, Owner: "none"}
	got = call(t, "nodes", "get", "node-1").wants(t, 0).out
	if strings.Count(got, "verdict: ") != 1 || !strings.Contains(got, "verdict: stale since") ||
		strings.Contains(got, "control plane\t") {
		t.Errorf("a healthy node:\n%s", got)
	}
	n.ControlPlaneReason = "control_plane_rollback"
	got = call(t, "nodes", "get", "node-1").wants(t, 0).out
	if want := "control plane\tcontrol_plane_rollback, which is no reason of this node"; !strings.Contains(got, want) {
		t.Errorf("%q is missing of a node that is connected to a control plane in rollback mode:\n%s", want, got)
	}
}

// Scenario: the history of a node is one of its own; a person of a tenant is refused.
func TestVerdictsOfANode(t *testing.T) {
	f := mesh(t)
	stock(f)
	got := call(t, "nodes", "verdicts", "node-1").wants(t, 0).out
	for _, text := range []string{"agent_down", "it lasts", "cloned_identity_detected", "P0", "4s"} {
		if !strings.Contains(got, text) {
			t.Errorf("%q is missing in\n%s", text, got)
		}
	}
	if req := sent[*readmodelv1.ListNodeVerdictsRequest](f); len(req) != 1 || req[0].GetNode() != "node-1" {
		t.Errorf("asked %v", req)
	}
	call(t, "nodes", "verdicts").wants(t, 2)
	refuse(f, "ListNodeVerdicts", fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "it is not for tenants"))
	call(t, "nodes", "verdicts", "node-1").wants(t, 4)
}

// Scenario: the facts that a person accepts are those that the mesh shows, or those of the fingerprint that nodes get
// printed before.
func TestFactsAreAcceptedAsTheyWereSeen(t *testing.T) {
	f := mesh(t)
	n := node()
	const differs = "kernel is 6.9.0, accepted is 6.1.0"
	n.Verdict = &recoveryv1.NodeVerdict{
		NodeId: nodeID, Reason: commonv1.DriftReason_DRIFT_REASON_HOST_RUNTIME_DRIFT,
		Evidence: []*recoveryv1.Evidence{
			{Reason: commonv1.DriftReason_DRIFT_REASON_HOST_RUNTIME_DRIFT, Detail: differs},
		},
	}
	always(f, "GetNode", &readmodelv1.GetNodeResponse{Node: n})
	always(f, "AcceptHostFacts", &readmodelv1.AcceptHostFactsResponse{Accepted: differs})
	if got := call(t, "nodes", "get", "node-1").wants(t, 0).out; !strings.Contains(got,
		"accept them with --seen "+shown.Fingerprint(differs)) {
		t.Errorf("the fingerprint is missing in\n%s", got)
	}
	if got := call(t, "nodes", "accept-facts", "node-1", "--reason", "meant").wants(t, 0); !strings.Contains(got.err,
		"accepted: "+differs) {
		t.Errorf("it prints %q", got.err)
	}
	call(t, "nodes", "accept-facts", "node-1", "--reason", "meant", "--seen", "0a1b2c3d4e5f6071").wants(t, 0)
	req := sent[*readmodelv1.AcceptHostFactsRequest](f)
	if len(req) != 2 || req[0].GetSeen() != shown.Fingerprint(differs) || req[1].GetSeen() != "0a1b2c3d4e5f6071" {
		t.Errorf("sent %v", req)
	}
}
