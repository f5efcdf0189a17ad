package client_test

import (
	"encoding/json"
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

func rolledBack() *recoveryv1.RollbackMode {
	return &recoveryv1.RollbackMode{
		Active: true, Since: at(2), Era: 3, IncidentId: claimID, ReportedBy: "recovery", EvidenceTotal: 40,
		Evidence: []*recoveryv1.RollbackEvidence{{
			Kind: recoveryv1.RollbackEvidenceKind_ROLLBACK_EVIDENCE_KIND_NODE_AHEAD, Subject: nodeID,
			Detail: "node n1 shows generation 9", Count: 2, LastSeenAt: at(3),
		}},
	}
}

func TestRollback(t *testing.T) {
	f := mesh(t)
	always(f, "GetRollback", &readmodelv1.GetRollbackResponse{Rollback: rolledBack()})
	got := call(t, "rollback", "status").wants(t, 0)
	for _, want := range []string{
		"active", "on evidence", "node_ahead", nodeID, "node n1 shows generation 9", "40",
		"gpuaas rollback accept",
	} {
		if !strings.Contains(got.out, want) {
			t.Errorf("%q is missing in\n%s", want, got.out)
		}
	}
	call(t, "rollback", "accept").wants(t, 2)
	always(f, "AcceptRollback", &readmodelv1.AcceptRollbackResponse{Rollback: &recoveryv1.RollbackMode{
		AcceptedBy: "op",
		Era:        4,
	}, Pos: "1:9"})
	got = call(t, "rollback", "accept", "--reason", "compared", "--yes", "-o", "json").wants(t, 0)
	var answer struct {
		Active     bool   `json:"active"`
		AcceptedBy string `json:"accepted_by"`
		Pos        string `json:"pos"`
	}
	if err := json.Unmarshal([]byte(got.out), &answer); err != nil || answer.Active || answer.AcceptedBy != "op" ||
		answer.Pos != "1:9" {
		t.Errorf("%s %v", got.out, err)
	}
	if req := sent[*readmodelv1.AcceptRollbackRequest](f); len(req) != 1 || req[0].GetReason() != "compared" {
		t.Errorf("%v", req)
	}
	refuse(f, "AcceptRollback", fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "rollback mode is not active"))
	call(t, "rollback", "accept", "--reason", "again", "--yes").wants(t, 5)
}

// While rollback mode is active the status begins with it, whatever the parts report.
func TestStatusShowsRollbackMode(t *testing.T) {
	f := mesh(t)
	always(f, "ListIncidents", &readmodelv1.ListIncidentsResponse{})
	always(f, "GetBrake", &readmodelv1.GetBrakeResponse{})
	well := &readmodelv1.ComponentStatus{Name: "database", Ok: true}
	always(f, "GetStatus", &readmodelv1.GetStatusResponse{Components: []*readmodelv1.ComponentStatus{well}})
	if got := call(t, "status").wants(t, 0); strings.Contains(got.out, "ROLLBACK") {
		t.Errorf("%s", got.out)
	}
	always(f, "GetStatus", &readmodelv1.GetStatusResponse{Components: []*readmodelv1.ComponentStatus{{
		Name: "control_plane", Detail: "rollback mode: the database is older", Reason: "control_plane_rollback",
		NextAction: "gpuaas rollback accept --reason TEXT",
	}, well}})
	got := call(t, "status").wants(t, 0)
	for _, want := range []string{
		"ROLLBACK MODE", "ACTIVE: rollback mode: the database is older", "control_plane", "down",
		"gpuaas rollback accept",
	} {
		if !strings.Contains(got.out, want) {
			t.Errorf("%q is missing in\n%s", want, got.out)
		}
	}
}

// The error of a command that is refused in rollback mode names the mode and how to end it.
func TestCommandsInRollbackMode(t *testing.T) {
	f := mesh(t)
	stock(f)
	refuse(f, "SetCordon", fault.New(commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK, ""))
	got := call(t, "nodes", "cordon", "n1", "--reason", "x")
	if got.code == 0 || !strings.Contains(got.err, "control_plane_rollback") || !strings.Contains(got.err,
		"gpuaas rollback accept --reason TEXT") {
		t.Errorf("%d %s", got.code, got.err)
	}
}
