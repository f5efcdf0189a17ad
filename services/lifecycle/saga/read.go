package saga

import (
	"context"
	"fmt"

	"github.com/gpuaas/mesh/internal/pg"
)

// ReadRuns reads the rows of runs, for callers that compare them with their events. Ids without a row are left out.
func ReadRuns(ctx context.Context, q pg.Querier, ids []string) ([]Run, error) {
	out, err := pg.All[Run](ctx, q, runsByID, ids)
	if err != nil {
		return nil, fmt.Errorf("read runs: %w", err)
	}
	return out, nil
}

// ReadWorkspaces is ReadRuns for workspaces.
func ReadWorkspaces(ctx context.Context, q pg.Querier, ids []string) ([]Workspace, error) {
	out, err := pg.All[Workspace](ctx, q, workspacesByID, ids)
	if err != nil {
		return nil, fmt.Errorf("read workspaces: %w", err)
	}
	return out, nil
}
