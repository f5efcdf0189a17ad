package watchdog

import (
	"context"
	"fmt"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
)

// MeasureEvery is how often a replica reads the state of the fleet for its metrics.
const MeasureEvery = 15 * time.Second

// openCount is a number of open recoveries of an outcome, or of open incidents of a kind.
type openCount struct {
	What    string  `db:"what"`
	Name    *string `db:"name"`
	Count   float64 `db:"count"`
	Engaged bool    `db:"engaged"`
	Back    bool    `db:"rolled_back"`
}

var countOpen = pg.Define(pg.RoleRecovery, "watchdog.count_open", `
	SELECT 'open' AS what, c.outcome AS name, count(*)::float8 AS count, b.engaged AS engaged, mesh.rolled_back() AS rolled_back FROM recovery.brake b
		LEFT JOIN recovery.recovery_record c ON c.ended_at IS NULL GROUP BY c.outcome, b.engaged
	UNION ALL SELECT 'incident', i.kind, count(*)::float8, false, false FROM recovery.incident i WHERE i.closed_at IS NULL GROUP BY i.kind`)

// Measure reads the numbers of open recoveries and incidents for the metrics.
func (w *Watchdog) Measure(ctx context.Context) error {
	var engaged, rolledBack bool
	open, incidents := map[string]float64{}, map[string]float64{}
	for _, outcome := range []commonv1.RecoveryOutcome{outcomeOpen, outcomeWithheld} {
		open[names.Of(outcome)] = 0
	}
	for _, kind := range names.Spellings[commonv1.IncidentKind]() {
		incidents[kind] = 0
	}
	rows, err := pg.All[openCount](ctx, w.deps.Pool, countOpen)
	if err != nil {
		return fmt.Errorf("count what is open: %w", err)
	}
	for _, row := range rows {
		engaged, rolledBack = engaged || row.Engaged, rolledBack || row.Back
		switch {
		case row.Name == nil: // no recovery is open
		case row.What == "open":
			open[*row.Name] = row.Count
		default:
			incidents[*row.Name] = row.Count
		}
	}
	w.metrics.rolledBack.Set(0)
	if rolledBack {
		w.metrics.rolledBack.Set(1)
	}
	w.metrics.engaged.Set(0)
	if engaged {
		w.metrics.engaged.Set(1)
	}
	for outcome, n := range open {
		w.metrics.open.WithLabelValues(outcome).Set(n)
	}
	for kind, n := range incidents {
		w.metrics.incidents.WithLabelValues(kind).Set(n)
	}
	return nil
}
