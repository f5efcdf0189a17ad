package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuaas/mesh/agent/diag"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
)

// meters counts for the ops listener. A nil one counts nothing.
type meters struct {
	retries  *prometheus.CounterVec
	refused  *prometheus.CounterVec
	sessions prometheus.Counter
}

func (m *meters) retry(code commonv1.DiagnosticCode) {
	if m != nil {
		m.retries.WithLabelValues(names.Of(code)).Inc()
	}
}

func (m *meters) refusedTask(reason commonv1.Reason) {
	if m != nil {
		m.refused.WithLabelValues(names.Of(reason)).Inc()
	}
}

func (m *meters) session() {
	if m != nil {
		m.sessions.Inc()
	}
}

// recoveryMeters returns the counts of automatic recovery, which outlive the process.
func (a *Agent) recoveryMeters() []prometheus.Collector {
	counter := func(name, help string, of func(*commonv1.RecoveryCounters) int64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help}, func() float64 {
			return float64(of(a.recovery.Counters()))
		})
	}
	return []prometheus.Collector{
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
	}
}

// recordMeter counts what stands in the host's diagnostic record: also what other processes recorded, such as an
// enrolment that refused a bundle, which has no ops listener.
type recordMeter struct{ entries func() []diag.Entry }

var recorded = prometheus.NewDesc("agent_diagnostics_recorded",
	"How often the entries in the host's diagnostic record were recorded, by any process of the agent.",
	[]string{"code"}, nil)

// Describe sends the description of the metric.
func (recordMeter) Describe(out chan<- *prometheus.Desc) { out <- recorded }

// Collect sends a count for each code in the record.
func (m recordMeter) Collect(out chan<- prometheus.Metric) {
	counts := map[string]int64{}
	for _, e := range m.entries() {
		counts[e.Code] += e.Count
	}
	for code, n := range counts {
		out <- prometheus.MustNewConstMetric(recorded, prometheus.GaugeValue, float64(n), code)
	}
}

var errNoSession = errors.New("no session is admitted")

// openOps listens for metrics and health, if that is configured.
func (a *Agent) openOps(ctx context.Context) error {
	if a.cfg.OpsListen == "" {
		return nil
	}
	registry, err := obs.NewRegistry()
	if err != nil {
		return err
	}
	a.meters = &meters{
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
	connected := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "agent_connected",
		Help: "1 while a session is admitted.",
	}, func() float64 {
		if a.connected(ctx) != nil {
			return 0
		}
		return 1
	})
	unacked := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "agent_unfinished_tasks",
		Help: "Task attempts without an acknowledged result.",
	}, func() float64 {
		a.mu.Lock()
		l := a.ledger
		a.mu.Unlock()
		if l == nil { // it could not be opened for the node as which this host was enrolled
			return 0
		}
		return float64(l.Open())
	})
	for _, c := range slices.Concat(
		[]prometheus.Collector{
			a.meters.retries, a.meters.refused, a.meters.sessions, connected, unacked, recordMeter{a.diag.Entries},
		}, a.recoveryMeters(),
	) {
		if err := registry.Register(c); err != nil {
			return fmt.Errorf("register metrics: %w", err)
		}
	}
	health := obs.NewHealth()
	health.Ready("session", a.connected)
	a.ops, err = obs.NewOpsServer(ctx, obs.OpsDeps{Logger: a.deps.Logger, Registry: registry, Health: health},
		a.cfg.OpsListen)
	return err
}

func (a *Agent) connected(context.Context) error {
	if a.session() == nil {
		return errNoSession
	}
	return nil
}
