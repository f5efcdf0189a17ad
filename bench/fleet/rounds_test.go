package fleet

import (
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// TestASweepHasRunOnceItHasSucceededTwice: failures do not count, and neither does one success.
func TestASweepHasRunOnceItHasSucceededTwice(t *testing.T) {
	registry := prometheus.NewRegistry()
	runs := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "gpuaas_background_runs_total"}, []string{"service", "job", "outcome"})
	registry.MustRegister(runs)
	count := func(job, outcome string, n int) { runs.WithLabelValues("lifecycle", job, outcome).Add(float64(n)) }
	for _, s := range sweeps {
		count(s, "done", rounds)
	}
	left, err := notRun(registry)
	if err != nil || len(left) > 0 {
		t.Errorf("sweeps that have succeeded twice are waited for: %q, %v", left, err)
	}
	runs.Reset()
	for _, s := range sweeps[2:] {
		count(s, "done", rounds)
	}
	count(sweeps[0], "done", 1)
	count(sweeps[1], "done", 1)
	count(sweeps[1], "failed", 3)
	if left, err = notRun(registry); err != nil || !slices.Equal(left, sweeps[:2]) {
		t.Errorf("%q are waited for, want %q, %v", left, sweeps[:2], err)
	}
}
