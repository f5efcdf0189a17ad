// Package static places workspaces on machines that were enrolled before: a workspace gets a slot, not an instance of
// its own.
//
// Its launch log is a table. It cannot end a machine, so it confirms an end only if no claim on a workload or on
// storage of the workspace up to that epoch is left, apart from those that earlier epochs gave up. An unreachable
// machine therefore keeps its workspaces.
package static

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
)

// Driver of slots.
type Driver struct{ db *pgxpool.Pool }

// New returns a driver.
func New(db *pgxpool.Pool) *Driver { return &Driver{db: db} }

// Launch takes the slot on request.NodeID, or returns the existing one if it is the same instance. It needs no
// transaction: one statement takes the slot, and what it read before is only for refusals that name their reason.
func (d *Driver) Launch(ctx context.Context, request placement.LaunchRequest) (placement.Launched, error) {
	slot, err := d.take(ctx, request)
	switch {
	case err != nil:
		return placement.Launched{}, fmt.Errorf("place on machine: %w", err)
	case slot.EndedAt != nil:
		err = fault.New(commonv1.Reason_REASON_EPOCH_ENDED, "this epoch of the workspace has ended")
	case slot.InstanceID != request.InstanceID:
		err = placement.LostHistory("static:"+slot.NodeID, slot.InstanceID, request)
	case slot.NodeID != request.NodeID:
		err = fault.New(commonv1.Reason_REASON_CONFLICT, "this epoch of the workspace stands on another machine",
			fault.Conflicting(slot.NodeID))
	default:
		return placement.Launched{ProviderID: "static:" + slot.NodeID, StartedAt: slot.StartedAt}, nil
	}
	return placement.Launched{}, fmt.Errorf("place on machine: %w", err)
}

// take takes the slot of request, or returns the one that the epoch of its workspace has. It keeps no connection while
// it asks for the permission, which needs one of the same pool: as many launches as the pool has would wait for each
// other.
func (d *Driver) take(ctx context.Context, request placement.LaunchRequest) (slotRow, error) {
	placed, err := pg.One[epochsRow](ctx, d.db, placedEpochs, request.WorkspaceID, request.Epoch)
	if err != nil {
		return slotRow{}, fmt.Errorf("read slots: %w", err)
	}
	if placed.Highest != nil && *placed.Highest > request.Epoch {
		return slotRow{}, fault.New(commonv1.Reason_REASON_EPOCH_SUPERSEDED, "a later epoch of the workspace was placed")
	}
	if placed.Alive != nil {
		return slotRow{}, fault.New(commonv1.Reason_REASON_PREVIOUS_EPOCH_ALIVE,
			"an earlier epoch of the workspace is not confirmed ended")
	}
	if err := request.Permitted(ctx); err != nil {
		return slotRow{}, err
	}
	slot, err := pg.One[slotRow](ctx, d.db, takeSlot, request.WorkspaceID, request.Epoch, request.InstanceID,
		request.NodeID)
	if err != nil {
		return slotRow{}, fmt.Errorf("take slot: %w", err)
	}
	return slot, nil
}

// End releases the slot once nothing of the workspace is left on the machine.
func (d *Driver) End(ctx context.Context, workspaceID string, epoch int64) error {
	err := pg.InTx(ctx, d.db, func(ctx context.Context, tx pgx.Tx) error {
		left, err := pg.Value[int](ctx, tx, countLeft, workspaceID, epoch)
		if err != nil {
			return fmt.Errorf("look for what is left: %w", err)
		}
		if left > 0 {
			return fault.New(commonv1.Reason_REASON_PREVIOUS_EPOCH_ALIVE,
				"the machine has not confirmed that the workspace's work is gone",
				fault.Unmet(fmt.Sprintf("%d workload and storage claims of epoch %d are not released", left, epoch)))
		}
		// One statement serves a slot that is taken, one that a concurrent launch has taken and not committed yet, and one
		// that was never taken: the last gets a tombstone, so that it is never taken later.
		if _, err := pg.Exec(ctx, tx, endSlot, workspaceID, epoch); err != nil {
			return fmt.Errorf("give slot back: %w", err)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("end placement: %w", err)
	}
	return nil
}

// Fence releases the slot by a person's attestation. The workspace's resources on the machine stay claimed until the
// machine is back and they are reaped.
func (d *Driver) Fence(ctx context.Context, workspaceID string, epoch int64, attestation string) error {
	if _, err := pg.Exec(ctx, d.db, fenceSlot, workspaceID, epoch, attestation); err != nil {
		return fmt.Errorf("fence placement: %w", err)
	}
	return nil
}

// List returns every slot that was ever taken.
func (d *Driver) List(ctx context.Context) ([]placement.Instance, error) {
	return d.list(ctx, listSlots)
}

// Standing returns the slots that are in use.
func (d *Driver) Standing(ctx context.Context) ([]placement.Instance, error) {
	return d.list(ctx, standingSlots)
}

func (d *Driver) list(ctx context.Context, which *pg.Statement) ([]placement.Instance, error) {
	slots, err := pg.All[slotRow](ctx, d.db, which)
	if err != nil {
		return nil, fmt.Errorf("list slots: %w", err)
	}
	out := make([]placement.Instance, 0, len(slots))
	for _, s := range slots {
		i := placement.Instance{
			WorkspaceID: s.WorkspaceID, Epoch: s.Epoch, InstanceID: s.InstanceID,
			ProviderID: "static:" + s.NodeID, StartedAt: s.StartedAt,
		}
		if s.EndedAt != nil {
			i.EndedAt = *s.EndedAt
		}
		out = append(out, i)
	}
	return out, nil
}
