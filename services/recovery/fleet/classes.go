package fleet

import (
	"context"
	"fmt"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/runbook"
)

// class is a failure of the same step with the same error in many workspaces.
type class struct {
	Step       string    `db:"step"`
	ErrorCode  string    `db:"error_code"`
	Tenants    []string  `db:"tenants" expr:"array_agg(DISTINCT @.tenant_id::text)"`
	Workspaces []string  `db:"workspaces" expr:"array_agg(DISTINCT @.workspace_id::text)"`
	Count      int64     `db:"count" expr:"count(*)"`
	LastSeenAt time.Time `db:"last_seen_at" expr:"max(@.seen_at)"`
	Layer      string    `db:"layer" expr:"max(@.error_layer)"`
}

var findClasses = pg.Define(pg.RoleRecovery, "fleet.find_classes", `
	SELECT `+pg.Columns[class]("c")+`
	FROM recovery.class_sighting c WHERE c.seen_at > mesh.clock() - make_interval(secs => $1) GROUP BY c.step, c.error_code
	ORDER BY c.step, c.error_code`)

// Classes makes one incident of a failure of the same step in many workspaces: the same error at ClassTenants tenants,
// or at two tenants and ClassPair workspaces, within ClassWindow. The incident is closed when the failure has not
// occurred for ClassQuiet.
func (r *Round) Classes(ctx context.Context) error {
	cfg := r.fleet.cfg
	found, err := pg.All[class](ctx, r.tx, findClasses, cfg.ClassWindow.Seconds())
	if err != nil {
		return fmt.Errorf("look for classes: %w", err)
	}
	for _, c := range found {
		i := &Incident{
			Kind: kindClass, Key: c.Step + "/" + c.ErrorCode, Step: c.Step, ErrorCode: c.ErrorCode,
			Tenants: c.Tenants, Workspaces: c.Workspaces, Count: c.Count, LastSeenAt: c.LastSeenAt,
		}
		if c.Layer != "" {
			if i.OwnerLayer, err = names.Parse[commonv1.OwnerLayer](c.Layer); err != nil {
				aside.Note(ctx, "watchdog.class", i.Key, err)
			}
		}
		i.NextAction = "this is one cause, not one of each: do not retry them one by one"
		if row, ok := runbook.Of(i.Step); ok {
			i.NextAction += "; likely: " + row.Cause
		}
		many := len(i.Tenants) >= cfg.ClassTenants || (len(i.Tenants) >= 2 && len(i.Workspaces) >= cfg.ClassPair)
		if many {
			i.Summary = fmt.Sprintf("%q fails with %s at %d tenants, %d workspaces", i.Step, i.ErrorCode, len(i.Tenants),
				len(i.Workspaces))
			err = r.Raise(ctx, i)
		} else {
			seen := i.LastSeenAt
			err = r.seenAgain(ctx, i, seen)
		}
		if err != nil {
			return err
		}
	}
	return r.CloseOthers(ctx, kindClass, func(i *Incident) bool { return r.now.Sub(i.LastSeenAt) < cfg.ClassQuiet })
}

// seenAgain keeps the open incident of a class open. Fewer workspaces are enough for that than for a new incident.
func (r *Round) seenAgain(ctx context.Context, i *Incident, seen time.Time) error {
	was, err := openIncident(ctx, r.tx, r.locked, i.Kind, i.Key)
	if err != nil || was == nil || !seen.After(was.LastSeenAt) {
		return err
	}
	i.Summary = was.Summary
	return r.goOn(ctx, was, i)
}
