package watchdog

import (
	"errors"
	"fmt"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/recovery/churn"
)

// The labels of lifecycle's answers to requests.
const (
	answerStarted    = "started"
	answerJoined     = "joined"
	answerRefused    = "refused"
	answerUnanswered = "unanswered"
)

// metrics counts the actions of this replica while it has the lease.
type metrics struct {
	found, asked, withheld, ended *prometheus.CounterVec
}

func newMetrics(r prometheus.Registerer) (*metrics, error) {
	counter := func(name, help, label string, values ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{label})
		for _, v := range values {
			c.WithLabelValues(v) // shown as zero before the first
		}
		return c
	}
	m := &metrics{
		found: counter("watchdog_detections_total", "Workspaces that this replica found to need a recovery, by trigger.",
			"trigger", names.Of(triggerStalled), names.Of(triggerSession), names.Of(triggerRegister)),
		asked: counter("watchdog_requests_total", "Recreations that this replica asked lifecycle for, by its answer.",
			"outcome", answerStarted, answerJoined, answerRefused, answerUnanswered),
		withheld: counter("watchdog_withheld_total",
			"Recoveries that this replica began to hold back, by what holds them: a budget of recreations, the brake, a "+
				"decision.",
			"by", withheldLabel(churn.ScopeWorkspace+":"), withheldLabel(churn.ScopePlacement+":"), withheldByBrake,
			withheldByIdentity, withheldByMachine, withheldByOwner, withheldByPerson, withheldByDeafness, withheldByAttempts),
		ended: counter("watchdog_recoveries_ended_total", "Recoveries that this replica saw end, by outcome.", "outcome",
			names.Of(outcomeRecovered), names.Of(outcomeFailed)),
	}
	if r == nil {
		return m, nil
	}
	err := errors.Join(r.Register(m.found), r.Register(m.asked), r.Register(m.withheld), r.Register(m.ended))
	if err != nil {
		return nil, fmt.Errorf("register metrics of the watchdog: %w", err)
	}
	return m, nil
}

// withheldLabel returns the metric label for the cause that withholds a recovery, without the key of a budget.
func withheldLabel(by string) string {
	if scope, _, ok := strings.Cut(by, ":"); ok {
		return scope + "_budget"
	}
	return by
}

// moved returns the counters that a change of a record increments.
func (m *metrics) moved(before, after *record) []prometheus.Counter {
	var out []prometheus.Counter
	if after.WithheldBy != "" && after.WithheldBy != before.WithheldBy {
		out = append(out, m.withheld.WithLabelValues(withheldLabel(after.WithheldBy)))
	}
	if after.EndedAt != nil && before.EndedAt == nil {
		out = append(out, m.ended.WithLabelValues(names.Of(after.Outcome)))
	}
	return out
}

// count increments counters. It is called after the commit of the changes that they count.
func count(counters []prometheus.Counter) {
	for _, c := range counters {
		c.Inc()
	}
}
