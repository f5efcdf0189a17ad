package background

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
)

// Outcomes of a run, as the metric has them.
const (
	outcomeDone    = "done"
	outcomeFailed  = "failed"
	outcomeTimeout = "timeout"
	outcomeBusy    = "still_running" // dropped, because the previous run still goes on
)

// metrics of the jobs of one replica.
type metrics struct {
	runs    *prometheus.CounterVec
	seconds *prometheus.HistogramVec
	lag     *prometheus.GaugeVec
	success *prometheus.GaugeVec
}

// newMetrics registers the metrics, with a series for each job from the start, so that a job that never ran has the
// value zero.
func newMetrics(to prometheus.Registerer, jobs []string) (*metrics, error) {
	m := &metrics{
		runs: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "background_runs_total", Help: "Runs of periodic work on this replica, by job and outcome.",
		}, []string{"job", "outcome"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "background_run_seconds", Help: "How long runs of periodic work took, by job.",
			Buckets: []float64{.005, .02, .1, .5, 1, 5, 15, 60, 300},
		}, []string{"job"}),
		lag: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "background_lag_seconds",
			Help: "How long after its due time the last run of periodic work on this replica began, by job.",
		}, []string{"job"}),
		success: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "background_last_success_timestamp_seconds",
			Help: "When periodic work last succeeded on this replica, by job; 0: not since its start.",
		}, []string{"job"}),
	}
	for _, job := range jobs {
		for _, outcome := range []string{outcomeDone, outcomeFailed, outcomeTimeout, outcomeBusy} {
			m.runs.WithLabelValues(job, outcome)
		}
		m.success.WithLabelValues(job)
	}
	for _, c := range []prometheus.Collector{m.runs, m.seconds, m.lag, m.success} {
		if err := to.Register(c); err != nil {
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	return m, nil
}
