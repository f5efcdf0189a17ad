package gate

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
)

var (
	// showWaiting is for gates that are locked.
	showWaiting = pg.Define(pg.RoleLifecycle, "gate.show_waiting_cordon", `
		UPDATE lifecycle.node_gate g SET waiting_cordon = v.reason, version = g.version + 1,
			waiting_cordon_since = COALESCE(g.waiting_cordon_since, mesh.clock())
		FROM lifecycle.verdict_cordon v
		WHERE v.node_id = ANY($1::uuid[]) AND v.withheld AND g.node_id = v.node_id AND g.waiting_cordon <> v.reason
		RETURNING `+columns)
	hideWaiting = pg.Define(pg.RoleLifecycle, "gate.hide_waiting_cordon", `
		UPDATE lifecycle.node_gate g SET waiting_cordon = '', waiting_cordon_since = NULL, version = g.version + 1
		WHERE g.node_id = ANY($1::uuid[]) AND g.waiting_cordon <> '' RETURNING `+columns)
	countWaiting = pg.Define(pg.RoleLifecycle, "gate.count_waiting_cordons", `
		SELECT count(*)::int FROM lifecycle.verdict_cordon v WHERE v.withheld`)
)

// reportWaiting has gates show the cordons that wait, or no longer, with an event of each that changes.
func reportWaiting(ctx context.Context, tx pgx.Tx, statement *pg.Statement, nodes []string) error {
	if len(nodes) == 0 {
		return nil
	}
	gates, err := all(ctx, tx, statement, nodes)
	if err != nil {
		return fmt.Errorf("show cordons that wait: %w", err)
	}
	if len(gates) == 0 {
		return nil
	}
	list := make([]events.Event, len(gates))
	for i, g := range gates {
		list[i] = g.event()
	}
	if _, err := events.Append(ctx, tx, list...); err != nil {
		return fmt.Errorf("report gates whose cordons wait: %w", err)
	}
	return nil
}

// NewWaiting returns the gauge of cordons that wait, for the field Waiting of Cordons.
func NewWaiting(r prometheus.Registerer) (prometheus.Gauge, error) {
	gauge := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "verdict_cordons_waiting",
		Help: "Nodes that verdicts want to cordon and that are not, because that were too many of the fleet at once " +
			"(brake.fleet_fraction). Every replica has the same number.",
	})
	if err := r.Register(gauge); err != nil {
		return nil, fmt.Errorf("register metric of waiting cordons: %w", err)
	}
	return gauge, nil
}

// Measure sets the gauge of cordons that wait.
func (c Cordons) Measure(ctx context.Context, db pg.Querier) error {
	waiting, err := pg.Value[int32](ctx, db, countWaiting)
	if err != nil {
		return fmt.Errorf("count cordons that wait: %w", err)
	}
	c.Waiting.Set(float64(waiting))
	return nil
}
