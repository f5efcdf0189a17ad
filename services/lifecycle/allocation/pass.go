package allocation

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

var preparedBefore = pg.Define(pg.RoleLifecycle, "allocation.prepared_before",
	`SELECT i.epoch FROM lifecycle.instance i WHERE i.workspace_id = $1 AND i.epoch < $2 AND i.state = 'prepared'`)

var slotOfAllocation = pg.Define(pg.RoleLifecycle, "allocation.slot_of_allocation",
	`SELECT slot FROM lifecycle.allocation WHERE allocation_id = $1`)

// Pass releases the allocation of an earlier epoch. With keep, this epoch gets the same slot of the same
// machine in the same transaction, so that no other workspace takes the slot that the storage belongs to.
func Pass(ctx context.Context, tx pgx.Tx, env *saga.Env, slots []claims.Claim, keep bool) error {
	for _, c := range slots {
		if err := env.ReleaseTx(ctx, tx, c); err != nil {
			return fmt.Errorf("release slot: %w", err)
		}
	}
	// No provider has anything of an instance that was prepared and never launched.
	prepared, err := pg.Values[int64](ctx, tx, preparedBefore, env.WorkspaceID, env.Epoch)
	if err != nil {
		return fmt.Errorf("look for prepared instances: %w", err)
	}
	for _, epoch := range prepared {
		i, ok, err := InstanceOf(ctx, tx, env.WorkspaceID, epoch)
		if err != nil || !ok {
			return err
		}
		if _, err := SetInstance(ctx, tx, i, commonv1.InstanceState_INSTANCE_STATE_ENDED, "", "",
			"never launched"); err != nil {
			return err
		}
	}
	a, held, err := Live(ctx, tx, env.WorkspaceID)
	if err != nil || !held || a.Epoch >= env.Epoch {
		return err
	}
	var slot *int32
	if err := pg.QueryRow(ctx, tx, slotOfAllocation, a.ID).Scan(&slot); err != nil {
		return fmt.Errorf("read slot: %w", err)
	}
	if _, err := Set(ctx, tx, a, commonv1.AllocationState_ALLOCATION_STATE_RELEASED, "none"); err != nil {
		return err
	}
	if !keep || slot == nil {
		return nil
	}
	return allocateAgain(ctx, tx, env, a, *slot)
}

var reserveSlotAgain = pg.Define(pg.RoleLifecycle, "allocation.reserve_slot_again", `
		INSERT INTO lifecycle.allocation AS a (allocation_id, workspace_id, tenant_id, epoch, state, placement, node_id,
			instance_id, slot, gpus, occupancy)
		VALUES ($1, $2, $3, $4, 'allocating', $5, $6, $7, $8, $9, 'reserved') RETURNING `+Columns)

// allocateAgain inserts the allocation of this epoch on the slot of an earlier one.
func allocateAgain(ctx context.Context, tx pgx.Tx, env *saga.Env, was Allocation,
	slot int32,
) error {
	allocationID := ids.New()
	if err := claimSlot(ctx, tx, env, was.NodeID, allocationID); err != nil {
		return err
	}
	now, err := One(ctx, tx, reserveSlotAgain,
		allocationID, env.WorkspaceID, env.TenantID, env.Epoch, names.Of(was.Placement), was.NodeID, ids.New(), slot,
		was.GPUs)
	if err != nil {
		return fmt.Errorf("insert allocation: %w", err)
	}
	if _, err := events.Append(ctx, tx, now.Event()); err != nil {
		return fmt.Errorf("report allocation: %w", err)
	}
	return nil
}
