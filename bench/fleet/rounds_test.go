package fleet

import (
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/services/lifecycle/findings"
)

// TestASweepHasRunOnceItHasSucceededTwice: failures do not count, one success does not, and neither do those of a fleet
// that has not stood for as long as it takes until something that is wrong can be found.
func TestASweepHasRunOnceItHasSucceededTwice(t *testing.T) {
	registry := prometheus.NewRegistry()
	runs := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "gpuaas_background_runs_total"},
		[]string{"service", "job", "outcome"})
	registry.MustRegister(runs)
	count := func(outcome string, n float64, jobs ...string) map[string]float64 {
		t.Helper()
		for _, job := range jobs {
			runs.WithLabelValues("lifecycle", job, outcome).Add(n)
		}
		done, err := succeeded(registry)
		if err != nil {
			t.Fatal(err)
		}
		return done
	}
	stood := count("done", 4, sweeps...)
	if left := notRun(stood, nil); !slices.Equal(left, sweeps) {
		t.Errorf("%q are waited for before the fleet has stood, want all", left)
	}
	count("done", rounds, sweeps[2:]...)
	count("done", 1, sweeps[0])
	count("done", 1, sweeps[1])
	if left := notRun(count("failed", 3, sweeps[1]), stood); !slices.Equal(left, sweeps[:2]) {
		t.Errorf("%q are waited for, want %q", left, sweeps[:2])
	}
	if left := notRun(count("done", 1, sweeps[:2]...), stood); len(left) > 0 {
		t.Errorf("sweeps that have succeeded twice are waited for: %q", left)
	}
}

// TestTheFleetStandsForLongEnough: a sweep may report something, and the watchdog take a machine for lost.
func TestTheFleetStandsForLongEnough(t *testing.T) {
	if grace := findings.Default().Grace; StandingFor() < grace {
		t.Errorf("the fleet stands for %s, and a finding takes %s", StandingFor(), grace)
	}
	if stale := policy.Defaults().HeartbeatStaleAfter(); StandingFor() < stale {
		t.Errorf("the fleet stands for %s, and a silent machine is lost after %s", StandingFor(), stale)
	}
}
