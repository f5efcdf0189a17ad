package allocation

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

var insertInstance = pg.Define(pg.RoleLifecycle, "allocation.insert_instance", `
			INSERT INTO lifecycle.instance AS i (instance_id, workspace_id, tenant_id, epoch, state, placement, node_id)
			VALUES ($1, $2, $3, $4, 'prepared', $5, nullif($6, '')::uuid) RETURNING `+InstanceColumns)

// Reserve makes the rows of the allocation and the instance of this epoch, or reads those that exist. The step enters
// the stage next with them.
func Reserve(ctx context.Context, env *saga.Env, spec *lifecyclev1.WorkspaceSpec, next string) (Allocation, Instance,
	error,
) {
	var a Allocation
	var i Instance
	err := env.TxInto(ctx, next, func(ctx context.Context, tx pgx.Tx) error {
		var ok bool
		var err error
		if a, ok, err = Live(ctx, tx, env.WorkspaceID); err != nil {
			return err
		}
		if ok {
			if a.Epoch != env.Epoch {
				return saga.Fail(commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW, commonv1.Reason_REASON_PREVIOUS_EPOCH_ALIVE,
					"an earlier epoch of the workspace still holds its allocation", nil)
			}
		} else if a, err = insertAllocation(ctx, tx, env, spec); err != nil {
			return err
		}
		if i, ok, err = InstanceOf(ctx, tx, env.WorkspaceID, env.Epoch); err != nil || ok {
			return err
		}
		i, err = OneInstance(ctx, tx, insertInstance,
			a.InstanceID, env.WorkspaceID, env.TenantID, env.Epoch, names.Of(spec.GetPlacement()), a.NodeID)
		if err != nil {
			return fmt.Errorf("insert instance: %w", err)
		}
		if _, err := events.Append(ctx, tx, a.Event(), i.Event()); err != nil {
			return fmt.Errorf("report reservation: %w", err)
		}
		return nil
	})
	return a, i, err
}

var insertAllocationRow = pg.Define(pg.RoleLifecycle, "allocation.insert_allocation_row", `
		INSERT INTO lifecycle.allocation AS a (allocation_id, workspace_id, tenant_id, epoch, state, placement, node_id,
			instance_id, slot, gpus, occupancy)
		VALUES ($1, $2, $3, $4, 'allocating', $5, nullif($6, '')::uuid, $7, $8, $9, 'reserved') RETURNING `+Columns)

func insertAllocation(ctx context.Context, tx pgx.Tx, env *saga.Env,
	spec *lifecyclev1.WorkspaceSpec,
) (Allocation, error) {
	allocationID, instanceID := ids.New(), ids.New()
	var node string
	var slot *int32
	if spec.GetPlacement() == commonv1.PlacementDriver_PLACEMENT_DRIVER_STATIC {
		var n int32
		var err error
		if node, n, err = TakeSlot(ctx, tx, spec.GetGpus()); err != nil {
			return Allocation{}, err
		}
		slot = &n
	}
	if err := claimSlot(ctx, tx, env, node, allocationID); err != nil {
		return Allocation{}, err
	}
	a, err := One(ctx, tx, insertAllocationRow,
		allocationID, env.WorkspaceID, env.TenantID, env.Epoch, names.Of(spec.GetPlacement()), node, instanceID, slot,
		spec.GetGpus())
	if err != nil {
		return Allocation{}, fmt.Errorf("insert allocation: %w", err)
	}
	return a, nil
}

// claimSlot claims and confirms the slot of this epoch, in the transaction that inserts its allocation.
func claimSlot(ctx context.Context, tx pgx.Tx, env *saga.Env, nodeID, allocationID string) error {
	claim, _, err := env.IntentTx(ctx, tx, claims.Spec{
		Kind: KindSlot, Name: fmt.Sprintf("slot-%d", env.Epoch), Scope: commonv1.ClaimScope_CLAIM_SCOPE_SHARED,
		NodeID: nodeID,
	})
	if err == nil {
		err = env.ConfirmTx(ctx, tx, claim, allocationID)
	}
	if err != nil {
		return fmt.Errorf("claim slot: %w", err)
	}
	return nil
}

var leasedDevices = pg.Define(pg.RoleLifecycle, "allocation.held_devices",
	`SELECT device_id FROM lifecycle.gpu_hold WHERE node_id = $1`)

var bindDevices = pg.Define(pg.RoleLifecycle, "allocation.bind_devices",
	`INSERT INTO lifecycle.gpu_hold (node_id, device_id, allocation_id) SELECT $1, d, $3 FROM unnest($2::text[]) d`)

var bindAllocation = pg.Define(pg.RoleLifecycle, "allocation.bind_allocation",
	`UPDATE lifecycle.allocation a SET node_id = $2, version = a.version + 1
			WHERE a.allocation_id = $1 RETURNING `+Columns)

// Bound reports whether the allocation is bound to a node and has all its GPUs.
func (a Allocation) Bound() bool { return a.NodeID != "" && len(a.Devices) >= int(a.GPUs) }

// bindTries is how often BindDevices chooses again. Of those that choose the same devices at once, each time one is the
// first.
const bindTries = 16

// BindDevices binds GPUs of the node to the allocation, unless it is bound. The table's key refuses a device that
// another allocation holds: if one took it meanwhile, others are chosen. The step enters the stage next with them.
func BindDevices(ctx context.Context, env *saga.Env, a Allocation, g gate.Gate, next string) (Allocation, error) {
	if a.Bound() {
		return a, nil
	}
	for try := 1; ; try++ {
		bound, err := bindFree(ctx, env, a, g, next)
		if !pg.IsUnique(err, "gpu_hold_pkey") || try == bindTries {
			return bound, err
		}
	}
}

// bindFree binds devices that no allocation holds.
func bindFree(ctx context.Context, env *saga.Env, a Allocation, g gate.Gate, next string) (Allocation, error) {
	was := a
	err := env.TxInto(ctx, next, func(ctx context.Context, tx pgx.Tx) error {
		a = was // a second try begins where the first did
		var free []string
		held, err := pg.Values[string](ctx, tx, leasedDevices, g.NodeID)
		if err != nil {
			return fmt.Errorf("read held devices: %w", err)
		}
		taken := map[string]bool{}
		for _, d := range held {
			taken[d] = true
		}
		for _, d := range g.Host.GetGpus() {
			if !taken[d.GetDeviceId()] {
				free = append(free, d.GetDeviceId())
			}
		}
		want := int(a.GPUs) - len(a.Devices)
		if len(free) < want {
			return saga.Retry(commonv1.OwnerLayer_OWNER_LAYER_DEPLOY, commonv1.Reason_REASON_NO_CAPACITY,
				fmt.Sprintf("the node has %d free GPUs, %d are needed", len(free), want), nil)
		}
		if want > 0 {
			if err := pg.Queue(ctx, tx, bindDevices, g.NodeID, free[:want], a.ID); err != nil {
				return fmt.Errorf("hold devices: %w", err)
			}
		}
		moved, err := One(ctx, tx, bindAllocation, a.ID, g.NodeID)
		if err != nil {
			return fmt.Errorf("bind allocation to node: %w", err)
		}
		if _, err := events.Append(ctx, tx, moved.Event()); err != nil {
			return fmt.Errorf("report allocation: %w", err)
		}
		a = moved
		return nil
	})
	return a, err
}
