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
