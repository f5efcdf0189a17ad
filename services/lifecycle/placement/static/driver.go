// Package static places workspaces on machines that were enrolled before: a slot, no box of its own.
//
// Its ledger is a table. It cannot end a machine, so it confirms an end only on proof that nothing of the workspace is left there: no claim on a
// workload or on storage of that epoch. An unreachable machine therefore keeps its workspaces.
package static

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
)

// Driver of slots.
type Driver struct{ db *pgxpool.Pool }

// New makes a driver.
func New(db *pgxpool.Pool) *Driver { return &Driver{db: db} }

// Launch takes the slot on box.NodeID, or returns the one that is there if it is the same instance.
func (d *Driver) Launch(ctx context.Context, box placement.Box) (placement.Launched, error) {
	var out placement.Launched
	err := pg.InTx(ctx, d.db, func(ctx context.Context, tx pgx.Tx) error {
		var highest *int64
		var alive *int64
		err := tx.QueryRow(ctx, `
			SELECT max(epoch), max(epoch) FILTER (WHERE ended_at IS NULL AND epoch <> $2) FROM lifecycle.static_placement WHERE workspace_id = $1`,
			box.WorkspaceID, box.Epoch).Scan(&highest, &alive)
		if err != nil {
			return fmt.Errorf("read slots: %w", err)
		}
		if highest != nil && *highest > box.Epoch {
			return fault.New(commonv1.Reason_REASON_EPOCH_SUPERSEDED, "a later epoch of the workspace was placed")
		}
		if alive != nil {
			return fault.New(commonv1.Reason_REASON_PREVIOUS_EPOCH_ALIVE, "an earlier epoch of the workspace is not confirmed ended")
		}
		if err := box.Permitted(ctx); err != nil {
			return err //nolint:wrapcheck // it is the caller's own
		}
		var ended *time.Time
		var node, instance string
		err = tx.QueryRow(ctx, `
			INSERT INTO lifecycle.static_placement AS s (workspace_id, epoch, instance_id, node_id) VALUES ($1, $2, $3, $4)
			ON CONFLICT (workspace_id, epoch) DO UPDATE SET workspace_id = s.workspace_id
			RETURNING node_id::text, instance_id::text, started_at, ended_at`,
			box.WorkspaceID, box.Epoch, box.InstanceID, box.NodeID).Scan(&node, &instance, &out.StartedAt, &ended)
		if err != nil {
			return fmt.Errorf("take slot: %w", err)
		}
		if ended != nil {
			return fault.New(commonv1.Reason_REASON_EPOCH_ENDED, "this epoch of the workspace has ended")
		}
		if instance != box.InstanceID {
			return placement.LostHistory("static:"+node, instance, box)
		}
		if node != box.NodeID {
			return fault.New(commonv1.Reason_REASON_CONFLICT, "this epoch of the workspace stands on another machine", fault.Conflicting(node))
		}
		out.ProviderID = "static:" + node
		return nil
	})
	if err != nil {
		return placement.Launched{}, fmt.Errorf("place on machine: %w", err)
	}
	return out, nil
}

// End gives the slot back once nothing of the workspace is left on the machine.
func (d *Driver) End(ctx context.Context, workspaceID string, epoch int64) error {
	err := pg.InTx(ctx, d.db, func(ctx context.Context, tx pgx.Tx) error {
		var left int
		err := tx.QueryRow(ctx, `
			SELECT count(*) FROM lifecycle.resource_claim
			WHERE workspace_id = $1 AND epoch <= $2 AND kind IN ('workload', 'storage') AND released_at IS NULL
				-- What an earlier epoch was given up with stands on its own machine, and is reaped there.
				AND (orphaned_at IS NULL OR epoch = $2)`, workspaceID, epoch).Scan(&left)
		if err != nil {
			return fmt.Errorf("look for what is left: %w", err)
		}
		if left > 0 {
			return fault.New(commonv1.Reason_REASON_PREVIOUS_EPOCH_ALIVE, "the machine has not confirmed that the workspace's work is gone",
				fault.Unmet(fmt.Sprintf("%d workload and storage claims of epoch %d are not released", left, epoch)))
		}
		// One statement for a slot that is taken, one that a launch beside this has taken and not committed yet, and one that never was: the last
		// gets a tombstone, which keeps it so.
		_, err = tx.Exec(ctx, `
			INSERT INTO lifecycle.static_placement AS s (workspace_id, epoch, instance_id, node_id, started_at, ended_at)
			VALUES ($1, $2, '00000000-0000-0000-0000-000000000000', '00000000-0000-0000-0000-000000000000', mesh.clock(), mesh.clock())
			ON CONFLICT (workspace_id, epoch) DO UPDATE SET ended_at = mesh.clock() WHERE s.ended_at IS NULL`, workspaceID, epoch)
		if err != nil {
			return fmt.Errorf("give slot back: %w", err)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("end placement: %w", err)
	}
	return nil
}

// Fence gives the slot back on a person's word. What the workspace left on the machine stays claimed until the machine is back and it is reaped.
func (d *Driver) Fence(ctx context.Context, workspaceID string, epoch int64, word string) error {
	_, err := d.db.Exec(ctx, `
		INSERT INTO lifecycle.static_placement AS s (workspace_id, epoch, instance_id, node_id, started_at, ended_at, fence_word)
		VALUES ($1, $2, '00000000-0000-0000-0000-000000000000', '00000000-0000-0000-0000-000000000000', mesh.clock(), mesh.clock(), $3)
		ON CONFLICT (workspace_id, epoch) DO UPDATE SET ended_at = mesh.clock(), fence_word = $3 WHERE s.ended_at IS NULL`, workspaceID, epoch, word)
	if err != nil {
		return fmt.Errorf("fence placement: %w", err)
	}
	return nil
}

// List answers every slot that was ever taken.
func (d *Driver) List(ctx context.Context) ([]placement.Instance, error) {
	rows, err := d.db.Query(ctx, `
		SELECT workspace_id::text, epoch, instance_id::text, node_id::text, started_at, ended_at FROM lifecycle.static_placement
		WHERE node_id <> '00000000-0000-0000-0000-000000000000'`)
	if err != nil {
		return nil, fmt.Errorf("list slots: %w", err)
	}
	defer rows.Close()
	var out []placement.Instance
	for rows.Next() {
		var i placement.Instance
		var ended *time.Time
		if err := rows.Scan(&i.WorkspaceID, &i.Epoch, &i.InstanceID, &i.ProviderID, &i.StartedAt, &ended); err != nil {
			return nil, errors.Join(errors.New("list slots"), err)
		}
		i.ProviderID = "static:" + i.ProviderID
		if ended != nil {
			i.EndedAt = *ended
		}
		out = append(out, i)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("list slots: %w", err)
	}
	return out, nil
}
