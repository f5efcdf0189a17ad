package workspace

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// Change is a change of a workspace's state and last error beside its run. An empty state leaves the state.
type Change struct {
	ID, RunID, State string
	Code, Error      string
}

// Touch writes changes of workspaces, each of which must belong to its run, and returns the rows.
func Touch(ctx context.Context, tx pgx.Tx, changes []Change) ([]Row, error) {
	if len(changes) == 0 {
		return nil, nil
	}
	var workspaceIDs, runIDs, states, codes, errs []string
	for _, change := range changes {
		workspaceIDs, runIDs = append(workspaceIDs, change.ID), append(runIDs, change.RunID)
		states, codes, errs = append(states, change.State), append(codes, change.Code), append(errs, change.Error)
	}
	changed, err := pg.All[Row](ctx, tx, touchWorkspacesOf, workspaceIDs, runIDs, states, codes, errs)
	if err != nil {
		return nil, fmt.Errorf("change workspaces: %w", err)
	}
	if len(changed) != len(workspaceIDs) {
		return nil, fmt.Errorf("change workspaces: %d of %d belong to their runs", len(changed), len(workspaceIDs))
	}
	return changed, nil
}

// Reset marks a failed workspace as reset, and returns false if it is not failed, or reset already. The caller
// announces it.
func Reset(ctx context.Context, tx pgx.Tx, id string) (bool, error) {
	tag, err := pg.Exec(ctx, tx, resetWorkspace, id)
	if err != nil {
		return false, fmt.Errorf("reset workspace: %w", err)
	}
	return tag.RowsAffected() > 0, nil
}

// MarkUnreadable makes the workspace of a run stuck that no build here can read. The caller announces it.
func MarkUnreadable(ctx context.Context, tx pgx.Tx, runID, why string) error {
	if _, err := pg.Exec(ctx, tx, quarantineWorkspace, runID, why); err != nil {
		return fmt.Errorf("mark workspace: %w", err)
	}
	return nil
}
