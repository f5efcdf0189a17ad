package client_test

import (
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// TestADecisionAboutANodeIsShownWithWhatFollows: the node that hold prints has the verdict that the hold leads to, and
// no session. A verdict that does not come is printed as it is, with a note.
func TestADecisionAboutANodeIsShownWithWhatFollows(t *testing.T) {
	f := mesh(t)
	held := &recoveryv1.NodeIdentity{
		NodeId: nodeID, Name: "node-1", State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD, StateAt: at(5),
	}
	always(f, "ChangeNodeIdentity", &readmodelv1.ChangeNodeIdentityResponse{Node: held, Pos: claimID})
	shown := func(second int, reason string, connected bool) *readmodelv1.GetNodeResponse {
		return &readmodelv1.GetNodeResponse{Node: &readmodelv1.Node{
			NodeId: nodeID, Name: "node-1", Identity: held, Reason: reason, Connected: connected,
			Verdict: &recoveryv1.NodeVerdict{Evidence: []*recoveryv1.Evidence{
				{Source: commonv1.EvidenceSource_EVIDENCE_SOURCE_IDENTITY, ObservedAt: at(second)},
			}},
		}}
	}
	answers := []*readmodelv1.GetNodeResponse{
		shown(1, "", true), shown(5, "identity_held", true), shown(5, "identity_held", false),
	}
	answer(f, "GetNode", func(req *readmodelv1.GetNodeRequest) (*readmodelv1.GetNodeResponse, error) {
		if req.GetMinPos() != claimID {
			t.Errorf("asked for %v", req)
		}
		next := answers[0]
		if len(answers) > 1 {
			answers = answers[1:]
		}
		return next, nil
	})
	got := call(t, "nodes", "hold", nodeID, "--reason", "r", "-o", "json").wants(t, 0)
	if !strings.Contains(got.out, `"reason": "identity_held"`) || !strings.Contains(got.out, `"connected": false`) ||
		strings.Contains(got.err, "from before") {
		t.Errorf("%s\n%s", got.out, got.err)
	}
	answers = []*readmodelv1.GetNodeResponse{shown(1, "", true)}
	got = call(t, "nodes", "hold", nodeID, "--reason", "r", "-o", "json").wants(t, 0)
	if !strings.Contains(got.err, "is from before: `gpuaas nodes get node-1`") || !strings.Contains(got.out, `"held"`) {
		t.Errorf("%s\n%s", got.out, got.err)
	}
}
