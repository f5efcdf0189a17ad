package gate

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
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

// LockOfWorkspace locks the gates of the nodes on which a workspace has something, for whoever may cordon one of them, or end a cordon, after it has locked
// the workspace's run.
func LockOfWorkspace(ctx context.Context, tx pgx.Tx, workspaceID string) error {
	_, err := tx.Exec(ctx, `
		SELECT FROM lifecycle.node_gate g WHERE g.node_id IN (
			SELECT a.node_id FROM lifecycle.allocation a WHERE a.workspace_id = $1 AND a.state <> 'released'
			UNION
			SELECT c.node_id FROM lifecycle.resource_claim c WHERE c.workspace_id = $1 AND c.released_at IS NULL
		) ORDER BY g.node_id FOR NO KEY UPDATE`, workspaceID)
	if err != nil {
		return fmt.Errorf("lock gates of workspace: %w", err)
	}
	return nil
}
