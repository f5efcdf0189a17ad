package allocation

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
)

var countOrphans = pg.Define(pg.RoleLifecycle, "allocation.count_orphans", `
		SELECT count(*) FROM lifecycle.resource_claim
		WHERE workspace_id = $1 AND epoch = $3 AND kind = ANY($2) AND orphaned_at IS NOT NULL AND released_at IS NULL`)

// CountOrphans counts the claims of one epoch that were given up and whose resources may still exist. Orphans of an
// earlier epoch stand on that epoch's machine.
func CountOrphans(ctx context.Context, q pg.Querier, workspaceID string, epoch int64) (int, error) {
	var n int
	err := pg.QueryRow(ctx, q, countOrphans, workspaceID, occupying(), epoch).Scan(&n)
	if err != nil {
		return 0, fmt.Errorf("count orphans: %w", err)
	}
	return n, nil
}

// KeepOccupied keeps a slot and its devices from being handed out while resources that were just given up may use them:
// the allocation becomes release_failed, and the machine takes no new workspace until that allocation is released.
func KeepOccupied(ctx context.Context, tx pgx.Tx, workspaceID string, orphans []claims.Claim, reason, by string) error {
	if !slices.ContainsFunc(orphans, func(c claims.Claim) bool { return slices.Contains(occupying(), c.Kind) }) {
		return nil
	}
	a, ok, err := Live(ctx, tx, workspaceID)
	if err != nil || !ok {
		return err
	}
	if a.State == commonv1.AllocationState_ALLOCATION_STATE_RELEASE_FAILED {
		return AnnounceOrphans(ctx, tx, workspaceID, a.Epoch)
	}
	return FailRelease(ctx, tx, a, "given up by "+by+": "+reason)
}

var raiseAllocation = pg.Define(pg.RoleLifecycle, "allocation.raise_allocation",
	`UPDATE lifecycle.allocation a SET version = a.version + 1 WHERE a.workspace_id = $1 AND a.epoch = $2 RETURNING `+
		Columns)

// AnnounceOrphans appends the event of the allocation of an epoch again after the number of its orphans has changed:
// the event has that number.
func AnnounceOrphans(ctx context.Context, tx pgx.Tx, workspaceID string, epoch int64) error {
	raised, err := All(ctx, tx, raiseAllocation, workspaceID, epoch)
	if err != nil {
		return fmt.Errorf("count orphans of allocation: %w", err)
	}
	return Announce(ctx, tx, raised)
}

// Announce appends the events of allocations.
func Announce(ctx context.Context, tx pgx.Tx, changed []Allocation) error {
	if len(changed) == 0 {
		return nil
	}
	list := make([]events.Event, len(changed))
	for i, a := range changed {
		list[i] = a.Event()
	}
	if _, err := events.Append(ctx, tx, list...); err != nil {
		return fmt.Errorf("report allocations: %w", err)
	}
	return nil
}
