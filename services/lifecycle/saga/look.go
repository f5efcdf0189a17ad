package saga

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// ReadRuns reads the rows of runs as they stand, for who compares them with what their events said. Ids that are not there are left out.
func ReadRuns(ctx context.Context, q pg.Querier, ids []string) ([]Run, error) {
	rows, err := q.Query(ctx, `SELECT `+runColumns+` FROM lifecycle.saga_run r WHERE r.id = ANY ($1::uuid[])`, ids)
	if err != nil {
		return nil, fmt.Errorf("read runs: %w", err)
	}
	out, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (Run, error) {
		var r Run
		return r, row.Scan(r.targets()...)
	})
	if err != nil {
		return nil, fmt.Errorf("read runs: %w", err)
	}
	return out, nil
}

// ReadWorkspaces is ReadRuns for workspaces.
func ReadWorkspaces(ctx context.Context, q pg.Querier, ids []string) ([]Workspace, error) {
	rows, err := q.Query(ctx, `SELECT `+workspaceColumns+` FROM lifecycle.workspace w WHERE w.id = ANY ($1::uuid[])`, ids)
	if err != nil {
		return nil, fmt.Errorf("read workspaces: %w", err)
	}
	out, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (Workspace, error) {
		var w Workspace
		return w, row.Scan(w.targets()...)
	})
	if err != nil {
		return nil, fmt.Errorf("read workspaces: %w", err)
	}
	return out, nil
}
