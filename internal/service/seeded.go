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

var seededBy = pg.DefineShared([]string{pg.RoleNodeAPI, pg.RoleLifecycle, pg.RoleRecovery, pg.RoleReadmodel},
	"service.seeded_by",
	`SELECT seeded_by FROM mesh.seeded`)

// refuseSeeded refuses a database whose fleet was loaded by a bench, unless the configuration allows one. A database
// that does not answer, or is not migrated yet, is asked again until the answer is known. The service waits for that
// database too, and ends if it is refused.
func (b *Base) refuseSeeded(ctx context.Context) error {
	known, err := b.askSeeded(ctx)
	if known {
		return err
	}
	b.Logger.WarnContext(ctx, "not known yet whether a bench seeded the database", obs.Err(err))
	b.Add(app.Task{Name: "seeded", Run: func(ctx context.Context) error {
		for app.Sleep(ctx, seededEvery) {
			known, err := b.askSeeded(ctx)
			if known && err != nil {
				return err
			}
			if known {
				<-ctx.Done() // a task that ends ends the service
			}
		}
		return nil
	}})
	return nil
}

// askSeeded reads once whether the fleet was loaded by a bench. It returns true and the refusal, if any, if that is
// known; otherwise false and the reason why it is not.
func (b *Base) askSeeded(ctx context.Context) (bool, error) {
	by, err := pg.Value[string](ctx, b.DB, seededBy)
	switch {
	case pg.IsNoRows(err):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("ask who seeded the database: %w", err)
	case b.Config.SeededDatabase:
		b.Logger.WarnContext(ctx, "the database was seeded by a bench: what it holds is no mesh",
			obs.Err(fmt.Errorf("seeded by %s", by)))
		return true, nil
	}
	return true, seeded(by)
}

// seededEvery is the interval of further attempts.
const seededEvery = time.Second

func seeded(by string) error {
	return fault.New(commonv1.Reason_REASON_DATABASE_SEEDED, "", fault.Cause(fmt.Errorf("seeded by %s", by)))
}
