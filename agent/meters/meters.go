// Package meters decides which numbers an agent shows at its ops listener, and counts some of them itself.
//
// It has the names of the metrics, their labels and their help. It reads the rest from its sources when it is scraped,
// so that a number never differs from what the agent acts on. It opens no listener.
package meters

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuaas/mesh/agent/diag"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// Sources are read at each scrape.
type Sources struct {
	Connected  func() bool                       // is a session admitted
	Unfinished func() int                        // task attempts without an acknowledged result
	Recovery   func() *commonv1.RecoveryCounters // which outlive the process
	Recorded   func() []diag.Entry               // the host's diagnostic record
}

// Meters counts for the ops listener. A nil one counts nothing.
type Meters struct {
	retries  *prometheus.CounterVec
	refused  *prometheus.CounterVec
	sessions prometheus.Counter
}

// New registers the metrics of an agent.
func New(r prometheus.Registerer, from Sources) (*Meters, error) {
	m := &Meters{
		retries: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "agent_retries_total", Help: "Retries of the session or of enrolment, by the diagnostic recorded before them.",
		}, []string{"code"}),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "agent_tasks_refused_total", Help: "Tasks that this agent would not take, by reason.",
		}, []string{"reason"}),
		sessions: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "agent_sessions_total",
			Help: "Sessions that were admitted.",
		}),
	}
	gauge := func(name, help string, of func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, of)
	}
	counter := func(name, help string, of func(*commonv1.RecoveryCounters) int64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help}, func() float64 {
			return float64(of(from.Recovery()))
		})
	}
	for _, c := range []prometheus.Collector{
		m.retries, m.refused, m.sessions,
		record{from.Recorded},
		gauge("agent_connected", "1 while a session is admitted.", func() float64 {
			if from.Connected() {
				return 1
			}
			return 0
		}),
		gauge("agent_unfinished_tasks", "Task attempts without an acknowledged result.",
			func() float64 { return float64(from.Unfinished()) }),
		counter("agent_recovery_attempts_total",
			"Attempts of automatic recovery since the state directory was made.",
			(*commonv1.RecoveryCounters).GetAttempts),
		counter("agent_recovery_successes_total",
			"Attempts of automatic recovery that brought a certificate.",
			(*commonv1.RecoveryCounters).GetSuccesses),
		counter("agent_recovery_failures_total",
			"Attempts of automatic recovery that failed.",
			(*commonv1.RecoveryCounters).GetFailures),
		counter("agent_recovery_suppressed_total",
			"Attempts of automatic recovery that were due and not allowed.",
			(*commonv1.RecoveryCounters).GetSuppressed),
	} {
		if err := r.Register(c); err != nil {
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	return m, nil
}

// Retry counts a retry of the session or of enrolment, by the diagnostic that was recorded before it.
func (m *Meters) Retry(code commonv1.DiagnosticCode) {
	if m != nil {
		m.retries.WithLabelValues(names.Of(code)).Inc()
	}
}

// RefusedTask counts a task that this agent would not take.
func (m *Meters) RefusedTask(reason commonv1.Reason) {
	if m != nil {
		m.refused.WithLabelValues(names.Of(reason)).Inc()
	}
}

// Session counts a session that was admitted.
func (m *Meters) Session() {
	if m != nil {
		m.sessions.Inc()
	}
}

// record counts what stands in the host's diagnostic record: also what other processes recorded, such as an enrolment
// that refused a bundle, which has no ops listener.
type record struct{ entries func() []diag.Entry }

var recorded = prometheus.NewDesc("agent_diagnostics_recorded",
	"How often the entries in the host's diagnostic record were recorded, by any process of the agent.",
	[]string{"code"}, nil)

// Describe sends the description of the metric.
func (record) Describe(out chan<- *prometheus.Desc) { out <- recorded }

// Collect sends a count for each code in the record.
func (r record) Collect(out chan<- prometheus.Metric) {
	counts := map[string]int64{}
	for _, e := range r.entries() {
		counts[e.Code] += e.Count
	}
	for code, n := range counts {
		out <- prometheus.MustNewConstMetric(recorded, prometheus.GaugeValue, float64(n), code)
	}
}
