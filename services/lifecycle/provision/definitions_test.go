package provision

import (
	"slices"
	"testing"

	"github.com/gpuaas/mesh/internal/runbook"
)

// TestTheRunbookKnowsEveryStepAndNoOther: a step without a row is a stall without advice, and a row without a step is
// advice that is never shown.
func TestTheRunbookKnowsEveryStepAndNoOther(t *testing.T) {
	reg, err := NewSteps(StepDeps{}).Registry()
	if err != nil {
		t.Fatal(err)
	}
	var steps []string
	for _, d := range reg.All() {
		for _, s := range d.Steps {
			steps = append(steps, s.Name)
			if row, ok := runbook.Of(s.Name); !ok || row.Cause == "" || row.Advice == "" {
				t.Errorf("%q of %q has no row in the runbook, or half of one", s.Name, d.Name)
			}
		}
	}
	if len(steps) < 12 {
		t.Fatalf("the definitions have %d steps only: %q", len(steps), steps)
	}
	seen := map[string]bool{}
	for _, r := range runbook.Rows() {
		if !slices.Contains(steps, r.Step) {
			t.Errorf("the runbook knows %q, which is a step of nothing", r.Step)
		}
		if seen[r.Step] {
			t.Errorf("the runbook knows %q twice", r.Step)
		}
		seen[r.Step] = true
	}
}
