package view

import (
	"context"
	"fmt"

	"github.com/gpuaas/mesh/internal/pg"
)

// Era returns the era of the database.
func (s *Snapshot) Era(ctx context.Context) (int64, error) {
	return pg.Era(ctx, s.tx)
}

var rolledBack = pg.Define(pg.RoleReadmodel, "view.rolled_back", `SELECT mesh.rolled_back()`)

var schemaVersion = pg.Define(pg.RoleReadmodel, "view.schema_version", `
	SELECT COALESCE(max(version_id), 0) FROM mesh.goose_db_version WHERE is_applied`)

// RolledBack reports whether rollback mode is active. It reads the database's present state and not the projection.
func (s *Snapshot) RolledBack(ctx context.Context) (bool, error) { return RolledBack(ctx, s.tx) }

// RolledBack reports whether rollback mode is active, as q sees it.
func RolledBack(ctx context.Context, q pg.Querier) (bool, error) {
	active, err := pg.Value[bool](ctx, q, rolledBack)
	if err != nil {
		return false, fmt.Errorf("read rollback mode: %w", err)
	}
	return active, nil
}

// Schema returns the version of the database's schema.
func (s *Snapshot) Schema(ctx context.Context) (string, error) {
	version, err := pg.Value[int64](ctx, s.tx, schemaVersion)
	if err != nil {
		return "", fmt.Errorf("read schema version: %w", err)
	}
	return fmt.Sprintf("%05d", version), nil
}
