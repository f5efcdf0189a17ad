package watchdog_test

import (
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs/obstest"
)

// metric requires that one series of the watchdog that was made last has the value want.
func (k *kit) metric(name, value string, want float64) {
	k.t.Helper()
	families, err := k.metrics.Gatherer().Gather()
	k.must(err)
	for _, f := range families {
		if f.GetName() != "gpuaas_"+name {
			continue
		}
		for _, m := range f.GetMetric() {
			found := value == ""
			for _, l := range m.GetLabel() {
				found = found || (l.GetName() != "service" && l.GetValue() == value)
			}
			if got := m.GetCounter().GetValue() + m.GetGauge().GetValue(); found && got != want {
				k.t.Errorf("%s of %q is %v, want %v", name, value, got, want)
			}
			if found {
				return
			}
		}
	}
	k.t.Errorf("%s of %q is not exposed", name, value)
}

func TestMetricsTellWhatTheWatchdogDoes(t *testing.T) {
	k := newKit(t)
	k.policySet("churn.recreates_per_hour", "1")
	b := k.up("acme", "one", byProcess, ids.New())
	var others []*instance // of the placement, whose budget is so above that of the one
	for _, name := range []string{"two", "three", "four", "five", "six"} {
		others = append(others, k.up("acme", name, byProcess, ids.New()))
	}
	measure := func() {
		t.Helper()
		k.must(k.all.Measure(k.ctx))
	}
	measure()
	k.metric("recoveries_open", "open", 0)
	k.metric("incidents_open", "churn_budget", 0)
	k.metric("watchdog_requests_total", "started", 0)
	k.lose(b)
	k.listen(130 * time.Second)
	k.settle()
	measure()
	k.metric("watchdog_detections_total", "session_lost", 1)
	k.metric("watchdog_requests_total", "started", 1)
	k.metric("recoveries_open", "open", 1)
	k.start(b, kRecreate, k.record(b).GetOperationId(), asked, recreating)
	k.back(b)
	k.succeed(b)
	k.round()
	k.metric("watchdog_recoveries_ended_total", "recovered", 1)
	// The second one waits for the budget, and is counted once however many rounds it waits.
	k.lose(b)
	k.listen(130 * time.Second)
	k.settle()
	k.round()
	k.round()
	measure()
	k.wantOutcome(k.record(b), withheld)
	k.metric("watchdog_detections_total", "session_lost", 2)
	k.metric("watchdog_detections_total", "stalled", 0)
	k.metric("watchdog_withheld_total", "workspace_budget", 1)
	k.metric("watchdog_withheld_total", "placement_budget", 0)
	k.metric("recoveries_open", "open", 0)
	k.metric("recoveries_open", "withheld", 1)
	k.metric("incidents_open", "churn_budget", 1)
	k.metric("fleet_brake_engaged", "", 0)
	for _, other := range others[:3] {
		k.lose(other)
	}
	k.listen(130 * time.Second)
	k.round()
	measure()
	k.metric("fleet_brake_engaged", "", 1)
	k.metric("incidents_open", "fleet_brake", 1)
	k.metric("watchdog_withheld_total", "brake", 4)
	obstest.Lint(t, k.metrics.Gatherer())
}

// TestVerdictsAreCountedByReason checks that the present verdicts are counted by their reason, that those which name
// none are not, that a reason which has gone is zero again, and that one of a newer build makes no series.
func TestVerdictsAreCountedByReason(t *testing.T) {
	k := newKit(t)
	write := func(reason string, nodes int) {
		t.Helper()
		for range nodes {
			_, err := k.db.OwnerPool().Exec(k.ctx, `INSERT INTO recovery.verdict (node_id, reason, body, began, version, since)
				VALUES ($1, $2, '', 1, 1, mesh.clock())`, ids.New(), reason)
			k.must(err)
		}
	}
	write("agent_down", 3)
	write("clock_skew", 1)
	write("unspecified", 5)
	write("of_a_newer_build", 2)
	k.must(k.all.Measure(k.ctx))
	k.metric("verdicts_present", "agent_down", 3)
	k.metric("verdicts_present", "clock_skew", 1)
	k.metric("verdicts_present", "cert_expired", 0)
	_, err := k.db.OwnerPool().Exec(k.ctx, `UPDATE recovery.verdict SET reason = 'unspecified'
		WHERE reason = 'agent_down'`)
	k.must(err)
	k.must(k.all.Measure(k.ctx))
	k.metric("verdicts_present", "agent_down", 0)
	families, err := k.metrics.Gatherer().Gather()
	k.must(err)
	for _, f := range families {
		if f.GetName() == "gpuaas_verdicts_present" && len(f.GetMetric()) != len(names.All[commonv1.DriftReason]()) {
			t.Errorf("%d series for %d reasons", len(f.GetMetric()), len(names.All[commonv1.DriftReason]()))
		}
	}
}
