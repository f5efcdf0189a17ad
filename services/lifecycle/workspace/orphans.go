package workspace

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

// occupying are the kinds of claims whose resource may still use a slot and its devices.
func occupying() []string { return []string{kindSlot, kindInstance, kindStorage, kindWorkload} }

// orphansOf counts what was given up of one epoch and may still be there. What an earlier epoch left stands on that epoch's machine.
func orphansOf(ctx context.Context, tx pgx.Tx, workspaceID string, epoch int64) (int, error) {
	var n int
	err := tx.QueryRow(ctx, `
		SELECT count(*) FROM lifecycle.resource_claim
		WHERE workspace_id = $1 AND epoch = $3 AND kind = ANY($2) AND orphaned_at IS NOT NULL AND released_at IS NULL`, workspaceID, occupying(), epoch).Scan(&n)
	if err != nil {
		return 0, fmt.Errorf("count orphans: %w", err)
	}
	return n, nil
}

// keepOccupied keeps a slot and its devices from being handed out while what was just given up may use them: the allocation is release_failed, and the
// machine takes no new workspace until somebody has looked.
func keepOccupied(ctx context.Context, tx pgx.Tx, workspaceID string, orphans []saga.Claim, reason, by string) error {
	if !slices.ContainsFunc(orphans, func(c saga.Claim) bool { return slices.Contains(occupying(), c.Kind) }) {
		return nil
	}
	a, ok, err := liveAllocation(ctx, tx, workspaceID)
	if err != nil || !ok {
		return err
	}
	return failRelease(ctx, tx, a, "given up by "+by+": "+reason)
}
