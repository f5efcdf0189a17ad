package watchdog_test

import (
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs/obstest"
)

// metric requires that a metric of the watchdog that was made last has the value want: the sum of its series of which a
// label has the value.
func (k *kit) metric(name, value string, want float64) {
	k.t.Helper()
	families, err := k.metrics.Gatherer().Gather()
	k.must(err)
	for _, f := range families {
		if f.GetName() != "gpuaas_"+name {
			continue
		}
		exposed, got := false, 0.
		for _, m := range f.GetMetric() {
			found := value == ""
			for _, l := range m.GetLabel() {
				found = found || (l.GetName() != "service" && l.GetValue() == value)
			}
			if found {
				exposed, got = true, got+m.GetCounter().GetValue()+m.GetGauge().GetValue()
			}
		}
		if exposed {
			if got != want {
				k.t.Errorf("%s of %q is %v, want %v", name, value, got, want)
			}
			return
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
	k.detect()
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
	k.detect()
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

// TestIncidentsAreCountedBySeverityAndAudience checks that open incidents are counted under their kind, their severity
// and who is to act, that a closed one is no longer, and that what this build does not know makes no series.
func TestIncidentsAreCountedBySeverityAndAudience(t *testing.T) {
	k := newKit(t)
	const suspected = "identity_suspected"
	k.openedBefore(suspected, "cloned_identity_detected", "p0")
	k.openedBefore(suspected, "token_reuse", "p0")
	k.openedBefore("fleet_drift", "agent_down", "p1")
	k.must(k.all.Measure(k.ctx))
	series := func() map[[3]string]float64 {
		t.Helper()
		out := map[[3]string]float64{}
		families, err := k.metrics.Gatherer().Gather()
		k.must(err)
		for _, f := range families {
			if f.GetName() != "gpuaas_incidents_open" {
				continue
			}
			for _, m := range f.GetMetric() {
				of := map[string]string{}
				for _, l := range m.GetLabel() {
					of[l.GetName()] = l.GetValue()
				}
				out[[3]string{of["kind"], of["severity"], of["audience"]}] = m.GetGauge().GetValue()
			}
		}
		return out
	}
	got := series()
	for labels, want := range map[[3]string]float64{
		{suspected, "p0", "security"}:                     2,
		{suspected, "p1", "security"}:                     0,
		{"fleet_drift", "p0", "control_plane"}:            0,
		{"fleet_drift", "p1", "control_plane"}:            1,
		{"machine_unreachable", "p1", "operator"}:         0,
		{"control_plane_rollback", "p0", "control_plane"}: 0,
	} {
		if n, exposed := got[labels]; !exposed || n != want {
			t.Errorf("%v has %v, exposed %t, want %v", labels, n, exposed, want)
		}
	}
	if want := len(names.All[commonv1.IncidentKind]()) * len(names.All[commonv1.Severity]()); len(got) != want {
		t.Errorf("%d series, want %d: %v", len(got), want, got)
	}
	_, err := k.db.OwnerPool().Exec(k.ctx, `UPDATE recovery.incident SET closed_at = mesh.clock(), closed_by = 'test'`)
	k.must(err)
	k.must(k.all.Measure(k.ctx))
	if n := series()[[3]string{suspected, "p0", "security"}]; n != 0 {
		t.Errorf("%v suspicions are counted, and all are closed", n)
	}
}

// openedBefore inserts an open incident.
func (k *kit) openedBefore(kind, key, severity string) {
	k.t.Helper()
	_, err := k.db.OwnerPool().Exec(k.ctx, `INSERT INTO recovery.incident (incident_id, kind, key, severity, summary,
		next_action, opened_at, last_seen_at) VALUES ($1, $2, $3, $4, '', '', mesh.clock(), mesh.clock())`,
		ids.New(), kind, key, severity)
	k.must(err)
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
