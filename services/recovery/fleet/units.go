package fleet

import (
	"context"
	"fmt"

	"github.com/gpuaas/mesh/internal/pg"
)

// placementStatic is the placement whose machines several workspaces share.
const placementStatic = "static"

// fleetCount is the number of units of a placement, each of which fails as one, and the number of its instances.
type fleetCount struct {
	Placement string `db:"placement"`
	Units     int32  `db:"units"`
	Instances int32  `db:"instances"`
}

// countFleet reads the counts that the triggers of the watchdog's workspaces keep, and adds the workspaces that are
// being recovered and whose state is not one in which they should be up.
var countFleet = pg.Define(pg.RoleRecovery, "fleet.count_units", `
	WITH recovered AS (
		SELECT w.placement, w.workspace_id, CASE WHEN w.placement = $1 THEN w.node_id END AS node_id
		FROM recovery.recovery_record c JOIN recovery.watch_workspace w USING (workspace_id)
		WHERE c.ended_at IS NULL AND w.state NOT IN ('provisioning', 'active', 'recreating', 'decommissioned')
	)
	SELECT x.placement, sum(x.units)::int AS units, sum(x.instances)::int AS instances FROM (
		SELECT c.placement, c.units, c.workspaces AS instances FROM recovery.watch_count c
		UNION ALL
		SELECT r.placement, count(DISTINCT coalesce(r.node_id, r.workspace_id)) FILTER (WHERE m.node_id IS NULL), count(*)
		FROM recovered r LEFT JOIN recovery.watch_machine m USING (node_id) GROUP BY r.placement
	) x
	GROUP BY x.placement HAVING sum(x.instances) > 0`)

// Units returns the number of units among the workspaces that should be up, which are instances and machines that
// several share. It counts them, and the instances of each placement, once a round.
func (r *Round) Units(ctx context.Context) (int32, error) {
	if r.instances != nil {
		return r.units, nil
	}
	rows, err := pg.All[fleetCount](ctx, r.tx, countFleet, placementStatic)
	if err != nil {
		return 0, fmt.Errorf("count the fleet: %w", err)
	}
	r.instances = map[string]int32{}
	for _, row := range rows {
		r.units += row.Units
		r.instances[row.Placement] = row.Instances
	}
	return r.units, nil
}

// Instances returns the number of instances of a placement.
func (r *Round) Instances(ctx context.Context, placement string) (int32, error) {
	if _, err := r.Units(ctx); err != nil {
		return 0, err
	}
	return r.instances[placement], nil
}
