package detect

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
)

var clockNow = pg.Define(pg.RoleLifecycle, "detect.clock_now", `SELECT mesh.clock()`)

// provisioned is a workspace name that was provisioned repeatedly within the window.
type provisioned struct {
	TenantID   string   `db:"tenant_id"`
	Name       string   `db:"name"`
	Newest     string   `db:"newest"` // workspace
	Runs       []string `db:"runs"`
	Workspaces int      `db:"workspaces"`
}

// provisionedName is a name that has reached the limit.
type provisionedName struct {
	TenantID string `db:"tenant_id"`
	Name     string `db:"name"`
}

// inWindow is the condition on a run r that provisions within the window.
const inWindow = `r.id >= $1 AND r.kind IN ('create', 'retry', 'recreate')
			AND r.created_at > mesh.clock() - make_interval(secs => $2)`

// provisionedOften reads the names alone: what is shown of a run is made only for those that have reached the limit.
var provisionedOften = pg.Define(pg.RoleLifecycle, "detect.provisioned_often", `
		SELECT w.tenant_id::text AS tenant_id, w.name
		FROM lifecycle.saga_run r JOIN lifecycle.workspace w ON w.id = r.workspace_id
		WHERE `+inWindow+`
		GROUP BY w.tenant_id, w.name HAVING count(*) >= $3`)

var provisionsOf = pg.Define(pg.RoleLifecycle, "detect.provisions_of", `
		SELECT w.tenant_id::text AS tenant_id, w.name,
			(array_agg(w.id::text ORDER BY r.created_at DESC))[1] AS newest,
			array_agg(r.kind || ' ' || r.id ORDER BY r.created_at) AS runs, count(DISTINCT w.id)::int AS workspaces
		FROM lifecycle.saga_run r JOIN lifecycle.workspace w ON w.id = r.workspace_id
		WHERE `+inWindow+`
			AND (w.tenant_id, w.name) IN (SELECT * FROM unnest($3::uuid[], $4::text[]))
		GROUP BY w.tenant_id, w.name`)

// Provisions finds workspace names that were provisioned at least ProvisionLimit times within ProvisionWindow.
func (d *Detectors) Provisions(ctx context.Context) ([]finding.Seen, error) {
	// Ids of runs rise with time, so the window is a range of the primary key. They are drawn by the clocks of replicas,
	// which may differ by some minutes.
	now, err := pg.Value[time.Time](ctx, d.db, clockNow)
	if err != nil {
		return nil, fmt.Errorf("read clock: %w", err)
	}
	from := lowestID(now.Add(-d.cfg.ProvisionWindow - 5*time.Minute))
	window := d.cfg.ProvisionWindow.Seconds()
	often, err := pg.All[provisionedName](ctx, d.db, provisionedOften, from, window, d.cfg.ProvisionLimit)
	if err != nil {
		return nil, fmt.Errorf("count provisions: %w", err)
	}
	if len(often) == 0 {
		return nil, nil
	}
	tenants, names := make([]string, 0, len(often)), make([]string, 0, len(often))
	for _, o := range often {
		tenants, names = append(tenants, o.TenantID), append(names, o.Name)
	}
	found, err := pg.All[provisioned](ctx, d.db, provisionsOf, from, window, tenants, names)
	if err != nil {
		return nil, fmt.Errorf("read provisions: %w", err)
	}
	out := make([]finding.Seen, 0, len(found))
	for _, p := range found {
		list := make([]any, 0, len(p.Runs))
		for _, r := range p.Runs {
			list = append(list, r)
		}
		out = append(out, finding.Seen{
			Kind: manyProvisions, Severity: finding.P2, SubjectType: "name", SubjectID: p.TenantID + "/" + p.Name,
			TenantID:    p.TenantID,
			WorkspaceID: p.Newest,
			Summary: fmt.Sprintf("%q was provisioned %d times within %s, as %d workspaces", p.Name, len(p.Runs),
				d.cfg.ProvisionWindow, p.Workspaces),
			NextAction: nextProvisions,
			Before:     map[string]any{"limit": d.cfg.ProvisionLimit}, After: map[string]any{"runs": list}, Certain: true,
		})
	}
	return out, nil
}

// lowestID returns the lowest id that can be drawn at the given time or later.
func lowestID(at time.Time) string {
	ms := uint64(at.UnixMilli())
	var id uuid.UUID
	for i := range 6 {
		id[i] = byte(ms >> (8 * (5 - i))) // the lowest byte is meant
	}
	id[6], id[8] = 0x70, 0x80
	return id.String()
}
