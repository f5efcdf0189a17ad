package claims

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

var orphanOfStep = pg.Define(pg.RoleLifecycle, "claims.orphan_of_step", `
		UPDATE lifecycle.resource_claim c SET orphaned_at = mesh.clock(), orphaned_by = $4, orphan_reason = $5,
			version = c.version + 1
		WHERE c.workspace_id = $1 AND c.released_at IS NULL AND c.orphaned_at IS NULL
			AND (c.kind = ANY ($2) OR (cardinality($2::text[]) = 0 AND c.run_id = $6 AND c.step = $3))
		RETURNING `+columns)

// OrphanStep orphans the live claims of a workspace that the undo of a step would have released, and returns them:
// those of the step's kinds, or those of the step itself if it has no kinds.
func OrphanStep(ctx context.Context, tx pgx.Tx, of Claimant, kinds []string, by, reason string) ([]Claim, error) {
	orphans, err := pg.All[Claim](ctx, tx, orphanOfStep, of.WorkspaceID, append([]string{}, kinds...), of.Step, by, reason,
		of.RunID)
	if err != nil {
		return nil, fmt.Errorf("orphan claims: %w", err)
	}
	return orphans, announce(ctx, tx, orphans...)
}

// orphanChange is the SET list of a change of orphan claims, and the condition that selects them.
type orphanChange struct{ set, which string }

// reaped appends to the reason for which a claim was given up how its resource is known to be gone.
const reaped = `released_at = mesh.clock(), orphan_reason = c.orphan_reason || '; reaped: ' || $1`

var (
	reapOfEpoch    = orphanChange{reaped, `c.workspace_id = $2 AND c.epoch = $3 AND c.kind = ANY ($4)`}
	reapOne        = orphanChange{reaped, `c.id = $2`}
	readoptOfEpoch = orphanChange{`orphaned_at = NULL, orphaned_by = '', orphan_reason = ''`, `c.workspace_id = $1
		AND c.epoch = $2
		AND NOT EXISTS (SELECT 1 FROM lifecycle.resource_claim l WHERE l.workspace_id = c.workspace_id AND l.kind = c.kind
			AND l.deterministic_name = c.deterministic_name AND l.id <> c.id AND l.released_at IS NULL
			AND (l.orphaned_at IS NULL OR l.id > c.id))`}
)

var changeOrphans = pg.DefineDynamic(pg.RoleLifecycle, "claims.change_orphans", func(o orphanChange) string {
	return `UPDATE lifecycle.resource_claim c SET ` + o.set + `, version = c.version + 1
			WHERE ` + o.which + ` AND c.orphaned_at IS NOT NULL AND c.released_at IS NULL RETURNING ` + columns
}, reapOfEpoch, reapOne, readoptOfEpoch)

// ReleaseOrphans releases the orphaned claims of one epoch of a workspace, of the given kinds, whose resources are
// confirmed gone; why records how that is known.
func ReleaseOrphans(ctx context.Context, tx pgx.Tx, workspaceID string, epoch int64, why string,
	kinds ...string,
) error {
	return reviseOrphans(ctx, tx, reapOfEpoch, why, workspaceID, epoch, kinds)
}

// ReleaseOrphan releases one orphaned claim whose resource is confirmed gone; why records how that is known.
func ReleaseOrphan(ctx context.Context, tx pgx.Tx, claimID, why string) error {
	return reviseOrphans(ctx, tx, reapOne, why, claimID)
}

// ReadoptOrphans makes the orphaned claims of one epoch live again, so that they are undone once more. A claim stays
// orphaned if a live claim, or a later orphan, of the workspace has the same kind and name.
func ReadoptOrphans(ctx context.Context, tx pgx.Tx, workspaceID string, epoch int64) error {
	return reviseOrphans(ctx, tx, readoptOfEpoch, workspaceID, epoch)
}

func reviseOrphans(ctx context.Context, tx pgx.Tx, change orphanChange, args ...any) error {
	changed, err := pg.All[Claim](ctx, tx, changeOrphans.For(change), args...)
	if err != nil {
		return fmt.Errorf("change orphan claims: %w", err)
	}
	return announce(ctx, tx, changed...)
}
