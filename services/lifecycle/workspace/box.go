package workspace

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

// Boxes hears of launched boxes through their gates.
type Boxes struct{ Core *saga.Core }

// SessionReady wakes the run that waits for its box's agent.
func (b Boxes) SessionReady(ctx context.Context, tx pgx.Tx, g gate.Gate) error {
	if g.WorkspaceID == "" {
		return nil
	}
	if err := b.Core.WakeWorkspaces(ctx, tx, g.WorkspaceID); err != nil {
		return fmt.Errorf("wake workspace: %w", err)
	}
	return nil
}

// RegisterFailures writes on the workspace how often its box was refused and why, if the box is of the workspace's epoch.
func (b Boxes) RegisterFailures(ctx context.Context, tx pgx.Tx, workspaceID string, epoch int64, count int32, lastError string) error {
	tag, err := tx.Exec(ctx, `
		UPDATE lifecycle.workspace SET register_failures = $3, last_error_code = 'register_failing', last_error = $4, version = version + 1
		WHERE id = $1 AND epoch = $2 AND (register_failures <> $3 OR last_error <> $4) AND state NOT IN ('active', 'decommissioned')`,
		workspaceID, epoch, count, lastError)
	if err != nil {
		return fmt.Errorf("write register failures: %w", err)
	}
	if tag.RowsAffected() == 0 {
		return nil
	}
	if _, _, err := saga.AnnounceWorkspace(ctx, tx, workspaceID); err != nil {
		return fmt.Errorf("report workspace: %w", err)
	}
	return nil
}
