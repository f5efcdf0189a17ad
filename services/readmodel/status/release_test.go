package status_test

import (
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/services/readmodel/status"
)

// TestTheNextActionNamesTheFailedRelease: while a node is away on which a release has failed, its next action has what
// is to be done after it is back; for another cordon, another reason or a node that is connected it has not.
//
// Scenario: release-failed-stuck
func TestTheNextActionNamesTheFailedRelease(t *testing.T) {
	active := &recoveryv1.NodeIdentity{State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE}
	release := &lifecyclev1.NodeGate{Cordoned: true, CordonedBy: "release"}
	verdict := func(reason commonv1.DriftReason) *recoveryv1.NodeVerdict {
		return &recoveryv1.NodeVerdict{Reason: reason, NextAction: "what recovery advises"}
	}
	down := verdict(commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN)
	for name, c := range map[string]struct {
		facts status.NodeFacts
		want  bool
	}{
		"not judged": {status.NodeFacts{Identity: active, Gate: release}, true},
		"agent down": {status.NodeFacts{Identity: active, Gate: release, Verdict: down}, true},
		"connected":  {status.NodeFacts{Identity: active, Gate: release, Connected: true}, false},
		"no cordon":  {status.NodeFacts{Identity: active, Gate: &lifecyclev1.NodeGate{CordonedBy: "release"}}, false},
		"by a person": {status.NodeFacts{
			Identity: active, Gate: &lifecyclev1.NodeGate{Cordoned: true, CordonedBy: "ada"},
		}, false},
		"cloned": {status.NodeFacts{
			Identity: active, Gate: release,
			Verdict: verdict(commonv1.DriftReason_DRIFT_REASON_CLONED_IDENTITY_DETECTED),
		}, false},
	} {
		got := status.Describe(c.facts).NextAction
		if strings.Contains(got, "gpuaas allocations retry-release") != c.want {
			t.Errorf("%s: next action %q", name, got)
		}
	}
	if got := status.Describe(status.NodeFacts{Identity: active}).NextAction; !strings.Contains(got, "diag") {
		t.Errorf("disconnected: next action %q has nothing for a node that stays away", got)
	}
}
