package client_test

import (
	"strings"
	"testing"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

func TestProjectionsAreVerifiedAndRebuilt(t *testing.T) {
	f := mesh(t)
	always(f, "VerifyProjections", &readmodelv1.VerifyProjectionsResponse{
		Report:      &readmodelv1.ProjectionReport{Events: 70, Parked: 1, Cut: true},
		Differences: []*readmodelv1.ProjectionDifference{{Table: "workspace", Missing: 2, Surplus: 1, Example: "0198"}},
	})
	got := call(t, "projections", "verify").wants(t, 5)
	for _, want := range []string{
		"EQUAL", "no", "70", "cut at the end of its term", "LEFT OUT",
		"2 missing, 1 surplus, such as 0198",
	} {
		if !strings.Contains(got.out, want) {
			t.Errorf("%q is missing in\n%s", want, got.out)
		}
	}
	if !strings.Contains(got.err, "projections rebuild") {
		t.Errorf("no remedy in\n%s", got.err)
	}
	always(f, "RebuildProjections",
		&readmodelv1.RebuildProjectionsResponse{Report: &readmodelv1.ProjectionReport{Events: 70, Cut: true, Announced: 12}})
	if got := call(t, "projections", "rebuild").wants(t, 0); !strings.Contains(got.out, "12") {
		t.Errorf("no announced rows in\n%s", got.out)
	}
}

func TestProjectionsAreShown(t *testing.T) {
	f := mesh(t)
	status := &readmodelv1.GetProjectionsResponse{
		Position: 70123, EventsBehind: 12, BehindSeconds: 3,
		Tables: []*readmodelv1.ProjectionTable{
			{Table: "node", Rows: 10000, Bytes: 3 << 20}, {Table: "workspace", Rows: 100000, Bytes: 45 << 20},
		},
	}
	always(f, "GetProjections", status)
	got := call(t, "projections", "status").wants(t, 0)
	for _, want := range []string{"node", "100000", "45.0 MiB", "EVENTS BEHIND", "12", "3s", "70123"} {
		if !strings.Contains(got.out, want) {
			t.Errorf("%q is missing in\n%s", want, got.out)
		}
	}
	if strings.Contains(got.out, "NEXT ACTION") {
		t.Errorf("a next action though nothing is parked:\n%s", got.out)
	}
	if got := call(t, "projections", "status", "-o", "json", "--jq", ".events_behind").wants(t, 0); got.out != "12\n" {
		t.Errorf("events behind: %q", got.out)
	}
	if got := call(t, "projections", "status", "-o", "name").wants(t, 0); got.out != "node\nworkspace\n" {
		t.Errorf("names: %q", got.out)
	}
	status.ParkedEvents = 2
	if got := call(t, "projections", "status").wants(t, 0); !strings.Contains(got.out, "gpuaas events parked") {
		t.Errorf("no next action for parked events:\n%s", got.out)
	}
}
