package gate

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// Lock locks a node's gate for a change. It comes before the locks of tasks, runs and what they are about.
func Lock(ctx context.Context, tx pgx.Tx, nodeID string) error {
	if nodeID == "" {
		return nil
	}
	if _, err := lockUpdate(ctx, tx, []string{nodeID}); err != nil {
		return err
	}
	return nil
}

// LockOfWorkspace locks the gates of the nodes on which a workspace has something, for whoever may cordon one of them,
// or end a cordon, after it has locked the workspace's run.
func LockOfWorkspace(ctx context.Context, tx pgx.Tx, workspaceID string) error {
	if _, err := pg.Exec(ctx, tx, lockGatesOfWorkspace, workspaceID); err != nil {
		return fmt.Errorf("lock gates of workspace: %w", err)
	}
	return nil
}
