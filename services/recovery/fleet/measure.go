package fleet

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
)

// gauges show the state of the fleet as this replica last read it.
type gauges struct {
	engaged, rolledBack prometheus.Gauge
	readAt              prometheus.Gauge
	open, incidents     *prometheus.GaugeVec
	verdicts            *prometheus.GaugeVec
}

func newGauges(r prometheus.Registerer) (*gauges, error) {
	g := &gauges{
		engaged: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "fleet_brake_engaged", Help: "Whether the fleet brake has stopped automatic remedies, 1 or 0, as this " +
				"replica last read it.",
		}),
		rolledBack: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "rollback_mode_active",
			Help: "Whether rollback mode has stopped the watchdog and all launches, 1 or 0, as this replica last read it.",
		}),
		open: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "recoveries_open", Help: "Recoveries that are open, by outcome so far, as this replica last read them.",
		}, []string{"outcome"}),
		incidents: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "incidents_open",
			Help: "Incidents that are open, by kind, severity and who is to act, as this replica last read them.",
		}, []string{"kind", "severity", "audience"}),
		readAt: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "fleet_last_read_timestamp_seconds",
			Help: "When this replica last read the state of the fleet that its metrics show; 0: not since its start.",
		}),
		verdicts: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "verdicts_present",
			Help: "Present verdicts that name a reason, on nodes and on the control plane, by reason, as this replica last " +
				"read them.",
		}, []string{"reason"}),
	}
	if r == nil {
		return g, nil
	}
	err := errors.Join(r.Register(g.engaged), r.Register(g.open), r.Register(g.incidents), r.Register(g.rolledBack),
		r.Register(g.verdicts), r.Register(g.readAt))
	if err != nil {
		return nil, fmt.Errorf("register metrics of the fleet: %w", err)
	}
	return g, nil
}

// MeasureEvery is how often a replica reads the state of the fleet for its metrics.
const MeasureEvery = 15 * time.Second

// openCount is a number of open recoveries of an outcome, of open incidents of a kind, or of verdicts with a reason.
type openCount struct {
	What     string  `db:"what"`
	Name     *string `db:"name"`
	Severity string  `db:"severity"`
	Count    float64 `db:"count"`
	Engaged  bool    `db:"engaged"`
	Back     bool    `db:"rolled_back"`
}

// ofIncidents are the labels of a series of open incidents, without the audience, which follows from the kind.
type ofIncidents struct{ kind, severity string }

// noIncidents returns the number zero for each kind and severity of incidents.
func noIncidents() map[ofIncidents]float64 {
	out := map[ofIncidents]float64{}
	for _, kind := range names.Spellings[commonv1.IncidentKind]() {
		for _, severity := range names.Spellings[commonv1.Severity]() {
			out[ofIncidents{kind, severity}] = 0
		}
	}
	return out
}

// setIncidents shows the numbers of open incidents.
func (g *gauges) setIncidents(incidents map[ofIncidents]float64) {
	for _, kind := range names.All[commonv1.IncidentKind]() {
		audience := fault.AlertOf(kind).Audience
		for _, severity := range names.Spellings[commonv1.Severity]() {
			g.incidents.WithLabelValues(names.Of(kind), severity, audience).Set(
				incidents[ofIncidents{names.Of(kind), severity}])
		}
	}
}

// countOpen reads what is open, and of verdicts those that name a reason, which have an index of their own: what it
// costs grows with the nodes that have a reason, and not with those that are well.
var countOpen = pg.Define(pg.RoleRecovery, "fleet.count_open", `
	SELECT 'open' AS what, c.outcome AS name, '' AS severity, count(*)::float8 AS count, b.engaged AS engaged,
		mesh.rolled_back() AS rolled_back FROM recovery.brake b
		LEFT JOIN recovery.recovery_record c ON c.ended_at IS NULL GROUP BY c.outcome, b.engaged
	UNION ALL SELECT 'incident', i.kind, i.severity, count(*)::float8, false, false FROM recovery.incident i
		WHERE i.closed_at IS NULL GROUP BY i.kind, i.severity
	UNION ALL SELECT 'verdict', v.reason, '', count(*)::float8, false, false FROM recovery.verdict v
		WHERE v.reason <> 'unspecified' GROUP BY v.reason`)

// Measure reads the numbers of open recoveries, of open incidents and of verdicts for the metrics. A reason, a kind
// or a severity that this build does not know is left out.
func (f *Fleet) Measure(ctx context.Context) error {
	var engaged, rolledBack bool
	open, incidents, verdicts := map[string]float64{}, noIncidents(), map[string]float64{}
	for _, outcome := range []commonv1.RecoveryOutcome{
		commonv1.RecoveryOutcome_RECOVERY_OUTCOME_OPEN, commonv1.RecoveryOutcome_RECOVERY_OUTCOME_WITHHELD,
	} {
		open[names.Of(outcome)] = 0
	}
	for _, reason := range names.Spellings[commonv1.DriftReason]() {
		verdicts[reason] = 0
	}
	rows, err := pg.All[openCount](ctx, f.deps.Pool, countOpen)
	if err != nil {
		return fmt.Errorf("count what is open: %w", err)
	}
	for _, row := range rows {
		engaged, rolledBack = engaged || row.Engaged, rolledBack || row.Back
		switch {
		case row.Name == nil: // no recovery is open
		case row.What == "open":
			open[*row.Name] = row.Count
		case row.What == "verdict":
			if _, known := verdicts[*row.Name]; known {
				verdicts[*row.Name] = row.Count
			}
		default:
			incidents[ofIncidents{*row.Name, row.Severity}] = row.Count
		}
	}
	f.gauges.rolledBack.Set(0)
	if rolledBack {
		f.gauges.rolledBack.Set(1)
	}
	f.gauges.engaged.Set(0)
	if engaged {
		f.gauges.engaged.Set(1)
	}
	for outcome, n := range open {
		f.gauges.open.WithLabelValues(outcome).Set(n)
	}
	f.gauges.setIncidents(incidents)
	for reason, n := range verdicts {
		f.gauges.verdicts.WithLabelValues(reason).Set(n)
	}
	f.gauges.readAt.SetToCurrentTime()
	return nil
}
