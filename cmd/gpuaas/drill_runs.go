package main

import (
	"fmt"
	"io"
	"slices"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	drillkit "github.com/gpuaas/mesh/drill/kit"
)

// repeated returns the drills of all runs: every drill once, then every drill once more.
func repeated(drills []drillkit.Drill, runs int) []drillkit.Drill {
	return slices.Repeat(drills, max(runs, 1))
}

// slowest returns of each drill the run that took longest to detect its fault, in the order of the first runs. Controls
// and failed runs are left out.
func slowest(results []drillkit.Result) []drillkit.Result {
	var out []drillkit.Result
	for _, r := range results {
		if r.Control != "" || !r.Passed {
			continue
		}
		i := slices.IndexFunc(out, func(o drillkit.Result) bool { return o.Name == r.Name })
		switch {
		case i < 0:
			out = append(out, r)
		case r.DetectedSeconds > out[i].DetectedSeconds:
			out[i] = r
		}
	}
	return out
}

// checkSlowest writes the slowest detection of each drill, and returns an error if one took longer than half its
// budget, or than the whole one where the budget is a deadline (`detection_p95_seconds`).
func checkSlowest(w io.Writer, results []drillkit.Result, runs int) error {
	var late error
	for _, r := range slowest(results) {
		fmt.Fprintf(w, "slowest of %d runs: %s detected after %s of %s\n", runs, r.Name, seconds(r.DetectedSeconds),
			seconds(r.DetectionP95))
		if late == nil && r.DetectedSeconds > r.DetectionP95 {
			late = exit.OverBudget(fmt.Sprintf("drill %s: the slowest of %d runs detected its fault after %s, of %s",
				r.Name, runs, seconds(r.DetectedSeconds), seconds(r.DetectionP95)),
				"look at the notes of that run with `-o json`; another load on this machine makes runs slow")
		}
	}
	return late
}
