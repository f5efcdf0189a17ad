package saga

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// AnnounceWorkspace appends the event of a workspace's row as it is in tx, and returns the row and the position token.
// A caller that changes a column of workspace raises its version in the same UPDATE and calls AnnounceWorkspace before
// the commit.
func AnnounceWorkspace(ctx context.Context, tx pgx.Tx, workspaceID string) (Workspace, string, error) {
	w, err := GetWorkspace(ctx, tx, workspaceID)
	if err != nil {
		return Workspace{}, "", err
	}
	var j eventBuffer
	if err := j.workspace(&w); err != nil {
		return Workspace{}, "", err
	}
	pos, err := j.flushPos(ctx, tx)
	return w, pos, err
}

// GetWorkspace reads one workspace. A missing one is pgx.ErrNoRows.
func GetWorkspace(ctx context.Context, q pg.Querier, id string) (Workspace, error) {
	w, err := pg.One[Workspace](ctx, q, workspaceByID, id)
	if err != nil {
		return Workspace{}, fmt.Errorf("read workspace %s: %w", id, err)
	}
	return w, nil
}

// ReadWorkspaces is ReadRuns for workspaces.
func ReadWorkspaces(ctx context.Context, q pg.Querier, ids []string) ([]Workspace, error) {
	out, err := pg.All[Workspace](ctx, q, workspacesByID, ids)
	if err != nil {
		return nil, fmt.Errorf("read workspaces: %w", err)
	}
	return out, nil
}
