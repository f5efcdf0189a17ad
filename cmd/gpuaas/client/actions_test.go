package client_test

import (
	"errors"
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

const openAction = recoveryv1.RecoveryActionState_RECOVERY_ACTION_STATE_OPEN

func recoveryActions() []*recoveryv1.RecoveryAction {
	return []*recoveryv1.RecoveryAction{
		{
			ActionId: claimID, NodeId: nodeID, NodeName: "node-1", State: openAction,
			Kind:   recoveryv1.RecoveryActionKind_RECOVERY_ACTION_KIND_RE_ENROLMENT,
			Reason: commonv1.DriftReason_DRIFT_REASON_CERT_EXPIRED, Requester: "auto_recovery", CorrelationId: "c-1",
			FirstRejectedAt: at(10), BegunAt: at(12), EffectAt: at(15), FailsAt: at(50), Attempts: 2,
			Outcome: "certificate 0a was issued",
		},
		{ActionId: taskID, State: openAction, Unknown: "orbit", BegunAt: at(5), FailsAt: at(50)},
	}
}

func TestRecoveryActions(t *testing.T) {
	f := mesh(t)
	always(f, "ListActions", &readmodelv1.ListActionsResponse{Items: recoveryActions()})
	always(f, "GetNode", &readmodelv1.GetNodeResponse{Node: node()})
	got := call(t, "nodes", "actions", nodeID, "--state", "open", "-o", "wide").wants(t, 0)
	for _, want := range []string{
		"re_enrolment", "open", "cert_expired", "certificate 0a was issued", "auto_recovery", "c-1", "5s", "control plane",
		"orbit (of a newer version)",
	} {
		if !strings.Contains(got.out, want) {
			t.Errorf("%q is missing in\n%s", want, got.out)
		}
	}
	if req := sent[*readmodelv1.ListActionsRequest](f); len(req) != 1 || req[0].GetState() != openAction ||
		req[0].GetNodeId() != nodeID {
		t.Errorf("%v", req)
	}
	got = call(t, "nodes", "actions", "-o", "json").wants(t, 0)
	for _, want := range []string{
		`"kind": "re_enrolment"`, `"state": "open"`, `"healthy_at": null`, `"unknown": "orbit"`,
	} {
		if !strings.Contains(got.out, want) {
			t.Errorf("%q is missing in\n%s", want, got.out)
		}
	}
	call(t, "nodes", "actions", "--state", "over").wants(t, 2)
	call(t, "nodes", "actions", "--state", "unspecified").wants(t, 2)
}

// Scenario: the details of a node have what is being done for it; those of one whose actions cannot be read are shown
// without.
func TestADetailedNodeHasItsOpenActions(t *testing.T) {
	f := mesh(t)
	always(f, "GetNode", &readmodelv1.GetNodeResponse{Node: node()})
	always(f, "ListActions", &readmodelv1.ListActionsResponse{Items: recoveryActions()[:1]})
	got := call(t, "nodes", "get", "node-1").wants(t, 0)
	const want = "recovery: open\tre_enrolment since 2026-01-02T03:04:12.500Z, 2 attempts, " +
		"fails 2026-01-02T03:04:50.500Z: certificate 0a was issued (correlation c-1)"
	if !strings.Contains(got.out, want) {
		t.Errorf("%s", got.out)
	}
	answer(f, "ListActions", func(*readmodelv1.ListActionsRequest) (*readmodelv1.ListActionsResponse, error) {
		return nil, fault.New(commonv1.Reason_REASON_UNAVAILABLE, "", fault.Cause(errors.New("away")))
	})
	if got := call(t, "nodes", "get", "node-1").wants(t, 0); strings.Contains(got.out, "recovery: open") {
		t.Errorf("%s", got.out)
	}
}
