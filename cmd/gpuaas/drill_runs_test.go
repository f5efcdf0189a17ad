package main

import (
	"strings"
	"testing"

	drillkit "github.com/gpuaas/mesh/drill/kit"
)

// TestTheSlowestRunIsChecked checks that of several runs of a drill the slowest counts, and that controls and failed
// runs do not.
func TestTheSlowestRunIsChecked(t *testing.T) {
	t.Parallel()
	run := func(name string, detected float64) drillkit.Result {
		return drillkit.Result{Name: name, Passed: true, DetectedSeconds: detected, DetectionP95: 5}
	}
	control, failed := run("a", 9), run("b", 9)
	control.Control, failed.Passed = string(drillkit.Withheld), false
	results := []drillkit.Result{run("a", 1), run("b", 5), control, run("a", 4.5), failed, run("b", 2)}
	var text strings.Builder
	if err := checkSlowest(&text, results, 2); err != nil {
		t.Error(err)
	}
	want := "slowest of 2 runs: a detected after 4.5s of 5s\nslowest of 2 runs: b detected after 5s of 5s\n"
	if text.String() != want {
		t.Errorf("told\n%swant\n%s", &text, want)
	}
	err := checkSlowest(&text, append(results, run("a", 5.1)), 3)
	const late = "drill a: the slowest of 3 runs detected its fault after 5.1s, of 5s"
	if err == nil || !strings.Contains(err.Error(), late) {
		t.Errorf("a run that is too slow: %v", err)
	}
	if drills := repeated(make([]drillkit.Drill, 3), 2); len(drills) != 6 {
		t.Errorf("%d drills in two runs of three", len(drills))
	}
}
