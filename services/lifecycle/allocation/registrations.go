package allocation

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// Registrations is called, through their gates, when launched instances register or fail to.
type Registrations struct{ Wakes *saga.Wakes }

// SessionReady wakes the run that waits for its instance's agent. An instance that has a session has registered.
func (b Registrations) SessionReady(ctx context.Context, tx pgx.Tx, g gate.Gate) error {
	if g.WorkspaceID == "" {
		return nil
	}
	if err := b.Wakes.WakeWorkspaces(ctx, tx, g.WorkspaceID); err != nil {
		return fmt.Errorf("wake workspace: %w", err)
	}
	return b.Registered(ctx, tx, g.WorkspaceID, g.Epoch)
}

// RegisterFailures writes on the workspace how often its instance was refused since it last registered and why, if the
// instance is of the workspace's epoch. An instance that has a session has registered, whichever other process tries
// with its secret; a count of zero means that it has.
func (b Registrations) RegisterFailures(ctx context.Context, tx pgx.Tx, workspaceID string, epoch int64, count int32,
	lastError string,
) error {
	if count == 0 {
		return b.Registered(ctx, tx, workspaceID, epoch)
	}
	return announceIf(ctx, tx, countRegisterFailures, workspaceID, epoch, count, lastError)
}

var countRegisterFailures = pg.Define(pg.RoleLifecycle, "allocation.count_register_failures", `
		UPDATE lifecycle.workspace
			SET register_failures = GREATEST(register_failures, $3), last_error_code = 'register_failing',
			last_error = $4, version = version + 1
		WHERE id = $1 AND epoch = $2 AND (register_failures < $3 OR last_error <> $4) AND state <> 'decommissioned'
			AND NOT EXISTS (SELECT 1 FROM lifecycle.node_gate g
				WHERE g.workspace_id = $1 AND g.epoch = $2 AND `+gate.ConnectedSQL+`)`)

var forgetRegisterFailures = pg.Define(pg.RoleLifecycle, "allocation.forget_register_failures", `
		UPDATE lifecycle.workspace SET register_failures = 0, version = version + 1,
			last_error_code = CASE WHEN last_error_code = 'register_failing' THEN '' ELSE last_error_code END,
			last_error = CASE WHEN last_error_code = 'register_failing' THEN '' ELSE last_error END
		WHERE id = $1 AND epoch = $2 AND register_failures > 0`)

// Registered clears the refusals of an instance that has registered.
func (b Registrations) Registered(ctx context.Context, tx pgx.Tx, workspaceID string, epoch int64) error {
	return announceIf(ctx, tx, forgetRegisterFailures, workspaceID, epoch)
}

// announceIf reports the workspace if the statement changed it.
func announceIf(ctx context.Context, tx pgx.Tx, s *pg.Statement, workspaceID string, args ...any) error {
	tag, err := pg.Exec(ctx, tx, s, append([]any{workspaceID}, args...)...)
	if err != nil {
		return fmt.Errorf("write register failures: %w", err)
	}
	if tag.RowsAffected() == 0 {
		return nil
	}
	if _, _, err := workspace.Announce(ctx, tx, workspaceID); err != nil {
		return fmt.Errorf("report workspace: %w", err)
	}
	return nil
}
