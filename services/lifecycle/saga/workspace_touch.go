package saga

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// touchWorkspace changes one workspace's state and last error beside its run.
func (c *Core) touchWorkspace(ctx context.Context, tx pgx.Tx, run *Run, j *eventBuffer, state, code,
	text string,
) error {
	return touch(ctx, tx, j, []string{run.WorkspaceID}, []string{run.ID}, []string{state}, []string{code}, []string{text})
}

func touch(ctx context.Context, tx pgx.Tx, j *eventBuffer, workspaces, runs, states, codes, errs []string) error {
	changed, err := pg.All[Workspace](ctx, tx, touchWorkspacesOf, workspaces, runs, states, codes, errs)
	if err != nil {
		return fmt.Errorf("change workspaces: %w", err)
	}
	if len(changed) != len(workspaces) {
		return fmt.Errorf("change workspaces: %d of %d belong to their runs", len(changed), len(workspaces))
	}
	for i := range changed {
		if err := j.workspace(&changed[i]); err != nil {
			return err
		}
	}
	return nil
}
