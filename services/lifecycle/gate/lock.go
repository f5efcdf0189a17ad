package gate

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// LockOfWorkspace locks the gates of the nodes on which a workspace has an allocation or claims. A caller that may
// cordon one of them, or end a cordon, after it has locked the workspace's run calls it first: in the order of locks
// gates come before tasks, runs, workspaces and allocations.
func LockOfWorkspace(ctx context.Context, tx pgx.Tx, workspaceID string) error {
	if _, err := pg.Exec(ctx, tx, lockGatesOfWorkspace, workspaceID); err != nil {
		return fmt.Errorf("lock gates of workspace: %w", err)
	}
	return nil
}
