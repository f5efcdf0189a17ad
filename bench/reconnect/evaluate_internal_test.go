package reconnect

import (
	"testing"
	"time"
)

// TestEvaluate checks that the bench fails if the agents were too slow, or if the mesh blamed a node for the outage.
func TestEvaluate(t *testing.T) {
	of := func(took ...time.Duration) []outage {
		var out []outage
		for _, d := range took {
			up := time.Unix(1000, 0)
			out = append(out, outage{up: up, all: up.Add(d)})
		}
		return out
	}
	for _, tt := range []struct {
		name   string
		ours   []outage
		blamed faults
		passed bool
	}{
		{name: "within twice", ours: of(9*time.Second, 4*time.Second, 4*time.Second), passed: true},
		{name: "too slow", ours: of(9*time.Second, 5*time.Second, time.Second)},
		{name: "was called down", ours: of(time.Second), blamed: faults{periods: map[string]int{"agent_down": 1}}},
		{name: "agent_down", ours: of(time.Second), blamed: faults{present: map[string]int{"agent_down": 1}}},
		{name: "was held", ours: of(time.Second), blamed: faults{periods: map[string]int{"identity_held": 1}}},
		{name: "is held", ours: of(time.Second), blamed: faults{inactive: map[string]int{"held": 1}}},
		{name: "away", ours: of(time.Second), blamed: faults{away: []string{"light-00001"}}},
		{
			name: "the outage itself", ours: of(time.Second), passed: true,
			blamed: faults{periods: map[string]int{"control_plane_outage": 3}},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bare := of(time.Second, 2*time.Second, 3*time.Second)
			if r := evaluate(defaults, tt.ours, bare, tt.blamed, map[string]any{}); r.Passed != tt.passed {
				t.Errorf("passed %t with ratio %.2f", r.Passed, r.Ratio)
			}
		})
	}
}
