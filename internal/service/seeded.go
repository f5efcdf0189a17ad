package service

import (
	"context"
	"fmt"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
)

var seededBy = pg.DefineShared([]string{pg.RoleNodeAPI, pg.RoleLifecycle, pg.RoleRecovery, pg.RoleReadmodel}, "service.seeded_by",
	`SELECT seeded_by FROM mesh.seeded`)

// refuseSeeded refuses a database whose fleet was loaded by a bench, unless the configuration allows one. A database
// that does not answer, or is not migrated yet, is not refused: the service waits for it.
func (b *Base) refuseSeeded(ctx context.Context) error {
	by, err := pg.Value[string](ctx, b.DB, seededBy)
	switch {
	case pg.IsNoRows(err):
		return nil
	case err != nil:
		b.Logger.WarnContext(ctx, "not known whether a bench seeded the database", obs.Err(err))
		return nil
	case b.Config.SeededDatabase:
		b.Logger.WarnContext(ctx, "the database was seeded by a bench: what it holds is no mesh", obs.Err(fmt.Errorf("seeded by %s", by)))
		return nil
	}
	return fault.New(commonv1.Reason_REASON_DATABASE_SEEDED, "", fault.Cause(fmt.Errorf("seeded by %s", by))) //nolint:wrapcheck // typed
}
