package service

import (
	"context"
	"fmt"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
)

var seededBy = pg.DefineShared([]string{pg.RoleNodeAPI, pg.RoleLifecycle, pg.RoleRecovery, pg.RoleReadmodel}, "service.seeded_by",
	`SELECT seeded_by FROM mesh.seeded`)

// refuseSeeded refuses a database whose fleet was loaded by a bench, unless the configuration allows one. Of a database
// that does not answer, or is not migrated yet, it is asked again until that is known: the service waits for it too, and
// ends if it is one.
func (b *Base) refuseSeeded(ctx context.Context) error {
	by, err := pg.Value[string](ctx, b.DB, seededBy)
	switch {
	case pg.IsNoRows(err):
		return nil
	case err != nil:
		b.Logger.WarnContext(ctx, "not known yet whether a bench seeded the database", obs.Err(err))
		b.Add(app.Task{Name: "seeded", Run: func(ctx context.Context) error {
			for app.Sleep(ctx, seededEvery) {
				by, err := pg.Value[string](ctx, b.DB, seededBy)
				switch {
				case pg.IsNoRows(err):
					<-ctx.Done() // a task that ends ends the service
					return nil
				case err == nil && !b.Config.SeededDatabase:
					return seeded(by)
				case err == nil:
					<-ctx.Done()
					return nil
				}
			}
			return nil
		}})
		return nil
	case b.Config.SeededDatabase:
		b.Logger.WarnContext(ctx, "the database was seeded by a bench: what it holds is no mesh", obs.Err(fmt.Errorf("seeded by %s", by)))
		return nil
	}
	return seeded(by)
}

// seededEvery is how often it is asked again.
const seededEvery = time.Second

func seeded(by string) error {
	return fault.New(commonv1.Reason_REASON_DATABASE_SEEDED, "", fault.Cause(fmt.Errorf("seeded by %s", by))) //nolint:wrapcheck // typed
}
