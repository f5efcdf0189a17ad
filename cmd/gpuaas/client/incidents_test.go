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

func incident() *recoveryv1.Incident {
	return &recoveryv1.Incident{
		IncidentId: claimID, Kind: commonv1.IncidentKind_INCIDENT_KIND_FLEET_BRAKE, Severity: commonv1.Severity_SEVERITY_P0,
		Summary: "5 of 9 failed at once", WorkspaceIds: []string{workspaceID, taskID}, Workspaces: []string{"acme/demo2", ""},
		TenantIds: []string{tenantID}, OpenedAt: at(2), LastSeenAt: at(3), NextAction: "find what they have in common",
		Count: 2,
	}
}

func recoveries() []*recoveryv1.RecoveryRecord {
	return []*recoveryv1.RecoveryRecord{{
		RecordId: taskID, WorkspaceId: workspaceID, Workspace: "acme/demo2",
		Trigger: commonv1.RecoveryTrigger_RECOVERY_TRIGGER_SESSION_LOST,
		Outcome: commonv1.RecoveryOutcome_RECOVERY_OUTCOME_RECOVERED, WhatWorked: "recreate", TotalSeconds: 75,
		DetectedAt: at(1), EndedAt: at(9), UserImpact: "it was away",
	}, {
		RecordId: runID, WorkspaceId: workspaceID, Workspace: "acme/demo2",
		Trigger: commonv1.RecoveryTrigger_RECOVERY_TRIGGER_STALLED, Step: "Allocate storage",
		Outcome: commonv1.RecoveryOutcome_RECOVERY_OUTCOME_WITHHELD, WithheldBecause: "the budget is used up", NextAt: at(30),
		DetectedAt: at(1),
	}}
}

func engaged() *recoveryv1.Brake {
	return &recoveryv1.Brake{
		Engaged: true, Reason: "5 of 9 failed at once", Affected: 5, Fleet: 9, Limit: 2, Since: at(2),
		IncidentId: claimID,
	}
}

func TestIncidentsAndRecoveries(t *testing.T) {
	f := mesh(t)
	always(f, "ListIncidents", &readmodelv1.ListIncidentsResponse{Items: []*recoveryv1.Incident{incident()}})
	always(f, "GetIncident", &readmodelv1.GetIncidentResponse{Incident: incident(), Recoveries: recoveries()})
	always(f, "ListRecoveries", &readmodelv1.ListRecoveriesResponse{Items: recoveries()})
	for line, want := range map[string][]string{
		"incidents list": {
			claimID, "fleet_brake", "P0", "5 of 9 failed at once",
		},
		"incidents get " + claimID: {
			"find what they have in common", "WORKSPACE\tacme/demo2", taskID, tenantID, "acme/demo2", "recreate",
		},
		"workspaces recoveries acme/demo2": {
			"session_lost", "recovered", "recreate", "Allocate storage", "the budget is used up (next ",
		},
		"workspaces recoveries acme/demo2 -o wide":                          {"it was away"},
		"workspaces recoveries acme/demo2 -o name":                          {taskID, runID},
		"incidents list -o json --jq .items[0].kind":                        {"fleet_brake"},
		"incidents get " + claimID + " -o json --jq .recoveries[1].outcome": {"withheld"},
	} {
		got := call(t, strings.Split(line, " ")...).wants(t, 0)
		for _, text := range want {
			if !strings.Contains(got.out, text) {
				t.Errorf("%s: %q is missing in\n%s", line, text, got.out)
			}
		}
	}
	call(t, "incidents", "list", "--all").wants(t, 0)
	if req := sent[*readmodelv1.ListIncidentsRequest](f); !req[len(req)-1].GetIncludeClosed() ||
		req[0].GetIncludeClosed() {
		t.Errorf("%v", req)
	}
	if req := sent[*readmodelv1.ListRecoveriesRequest](f); req[0].GetWorkspace() != "acme/demo2" {
		t.Errorf("%v", req)
	}
	call(t, "incidents", "get").wants(t, 2)
	refuse(f, "GetIncident", fault.New(commonv1.Reason_REASON_NOT_FOUND, "there is no such incident"))
	call(t, "incidents", "get", taskID).wants(t, 3)
}

// TestIncidentsClose checks that a person closes an incident with a reason, that both are shown of it afterwards, and
// that a refusal is one of a precondition.
func TestIncidentsClose(t *testing.T) {
	f := mesh(t)
	closed := &recoveryv1.Incident{
		IncidentId: claimID, Kind: commonv1.IncidentKind_INCIDENT_KIND_STATE_OVERDUE, ClosedAt: at(9),
		ClosedBy: "ann", CloseReason: "the rack is being moved",
	}
	call(t, "incidents", "close", claimID).wants(t, 2)
	call(t, "incidents", "close", "--reason", "x").wants(t, 2)
	always(f, "CloseIncident", &readmodelv1.CloseIncidentResponse{Incident: closed, Pos: "1:9"})
	got := call(t, "incidents", "close", claimID, "--reason", "the rack is being moved", "-o", "json").wants(t, 0)
	var answer struct {
		ClosedBy    string `json:"closed_by"`
		CloseReason string `json:"close_reason"`
		Pos         string `json:"pos"`
	}
	if err := json.Unmarshal([]byte(got.out), &answer); err != nil || answer.ClosedBy != "ann" ||
		answer.CloseReason != "the rack is being moved" || answer.Pos != "1:9" {
		t.Errorf("%s %v", got.out, err)
	}
	if req := sent[*readmodelv1.CloseIncidentRequest](f); len(req) != 1 || req[0].GetIncidentId() != claimID ||
		req[0].GetReason() != "the rack is being moved" {
		t.Errorf("%v", req)
	}
	always(f, "GetIncident", &readmodelv1.GetIncidentResponse{Incident: closed})
	got = call(t, "incidents", "get", claimID).wants(t, 0)
	for _, want := range []string{"CLOSED BY", "ann", "CLOSED FOR", "the rack is being moved"} {
		if !strings.Contains(got.out, want) {
			t.Errorf("%q is missing in\n%s", want, got.out)
		}
	}
	refuse(f, "CloseIncident", fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "the incident is closed"))
	call(t, "incidents", "close", claimID, "--reason", "again").wants(t, 5)
}

func TestBrake(t *testing.T) {
	f := mesh(t)
	always(f, "GetBrake", &readmodelv1.GetBrakeResponse{Brake: engaged()})
	if got := call(t, "brake", "status").wants(t, 0); !strings.Contains(got.out, "engaged") ||
		!strings.Contains(got.out, "5 of 9, 2 are allowed") {
		t.Errorf("%s", got.out)
	}
	call(t, "brake", "release").wants(t, 2)
	always(f, "ReleaseBrake", &readmodelv1.ReleaseBrakeResponse{Brake: &recoveryv1.Brake{ReleasedBy: "op"}, Pos: "1:9"})
	got := call(t, "brake", "release", "--reason", "the switch was replaced", "-o", "json").wants(t, 0)
	var answer struct {
		Engaged    bool   `json:"engaged"`
		ReleasedBy string `json:"released_by"`
		Pos        string `json:"pos"`
	}
	if err := json.Unmarshal([]byte(got.out), &answer); err != nil || answer.Engaged || answer.ReleasedBy != "op" ||
		answer.Pos != "1:9" {
		t.Errorf("%s %v", got.out, err)
	}
	if req := sent[*readmodelv1.ReleaseBrakeRequest](f); len(req) != 1 || req[0].GetReason() != "the switch was replaced" {
		t.Errorf("%v", req)
	}
	refuse(f, "ReleaseBrake", fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "the fleet brake is not engaged"))
	call(t, "brake", "release", "--reason", "again").wants(t, 5)
}

// TestStatusLeavesOutWhatTenantsAreNotSent has the answer that a person of a tenant gets, in which the figures of the
// whole mesh are unset: no line claims that there are no nodes and no events.
func TestStatusLeavesOutWhatTenantsAreNotSent(t *testing.T) {
	f := mesh(t)
	always(f, "GetStatus", &readmodelv1.GetStatusResponse{Workspaces: 2, WorkspacesActive: 1, LiveRuns: 1, Version: "v1"})
	got := call(t, "status").wants(t, 0)
	for _, want := range []string{"WORKSPACES\t2, 1 active", "LIVE RUNS\t1", "VERSION\tv1"} {
		if !strings.Contains(got.out, want) {
			t.Errorf("%q is missing in\n%s", want, got.out)
		}
	}
	for _, zero := range []string{"NODES", "FINDINGS", "EVENTS", "ERA"} {
		if strings.Contains(got.out, zero) {
			t.Errorf("%s is shown in\n%s", zero, got.out)
		}
	}
}

func TestStatusShowsIncidentsAndTheBrake(t *testing.T) {
	f := mesh(t)
	always(f, "GetStatus", &readmodelv1.GetStatusResponse{Nodes: 3})
	always(f, "ListIncidents", &readmodelv1.ListIncidentsResponse{Items: []*recoveryv1.Incident{incident()}})
	always(f, "GetBrake", &readmodelv1.GetBrakeResponse{Brake: engaged()})
	got := call(t, "status").wants(t, 0)
	for _, want := range []string{"BRAKE", "gpuaas brake release", "P0 fleet_brake", claimID} {
		if !strings.Contains(got.out, want) {
			t.Errorf("%q is missing in\n%s", want, got.out)
		}
	}
	var status struct {
		Nodes     int                              `json:"nodes"`
		Brake     struct{ Engaged bool }           `json:"brake"`
		Incidents []struct{ Kind, Summary string } `json:"incidents"`
	}
	got = call(t, "status", "-o", "json").wants(t, 0)
	if err := json.Unmarshal([]byte(got.out), &status); err != nil || status.Nodes != 3 || !status.Brake.Engaged ||
		len(status.Incidents) != 1 {
		t.Errorf("%s %v", got.out, err)
	}
	// A person who may not see incidents gets the rest of the status.
	refuse(f, "ListIncidents", fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, ""))
	got = call(t, "status", "-o", "json").wants(t, 0)
	status.Incidents = nil
	if err := json.Unmarshal([]byte(got.out), &status); err != nil || status.Nodes != 3 || len(status.Incidents) != 0 {
		t.Errorf("%s %v", got.out, err)
	}
	if got = call(t, "status").wants(t, 0); strings.Contains(got.out, "BRAKE") {
		t.Errorf("%s", got.out)
	}
}
