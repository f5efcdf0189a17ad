package reap

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// record writes that an orphan has ended: the row of its instance, the claims that were given up with it, and the
// allocation that waited for that.
func record(ctx context.Context, tx pgx.Tx, kind commonv1.PlacementDriver, b placement.Instance, why string) error {
	if err := gate.LockOfWorkspace(ctx, tx, b.WorkspaceID); err != nil { // the end of the instance may end a cordon
		return err
	}
	w, err := workspace.Get(ctx, tx, b.WorkspaceID)
	if err != nil {
		return err
	}
	i, ok, err := allocation.InstanceOf(ctx, tx, b.WorkspaceID, b.Epoch)
	switch {
	case err != nil:
		return err
	case !ok:
		err = insertEnded(ctx, tx, kind, b, w.TenantID, why)
	case ids.Valid(b.InstanceID) && i.ID != b.InstanceID:
		// The row is of the instance that this database meant to launch; the one that ran belonged to a history that the
		// database has lost.
		_, _, err = allocation.EndUnaccounted(ctx, tx, kind, b, "orphan: "+why)
	case i.State == commonv1.InstanceState_INSTANCE_STATE_ENDED:
		// By this row it had ended before, and yet it was running: the row is announced again, with the reason.
		err = announceAgain(ctx, tx, i, why)
	default:
		_, err = allocation.SetInstance(ctx, tx, i, commonv1.InstanceState_INSTANCE_STATE_ENDED, b.ProviderID, "",
			"orphan: "+why)
	}
	if err != nil {
		return err
	}
	kinds := []string{allocation.KindSlot, allocation.KindInstance}
	if placement.HasOwnInstance(kind) {
		kinds = append(kinds, allocation.KindIdentity, allocation.KindStorage,
			allocation.KindWorkload) // what stood on the instance is gone with it
	}
	if err := claims.ReleaseOrphans(ctx, tx, b.WorkspaceID, b.Epoch, allocation.InstanceEnded, kinds...); err != nil {
		return err
	}
	_, err = audit.Record(ctx, tx, audit.Entry{
		Action: "workspace.orphan.end", Reason: why, SubjectType: "instance", SubjectID: b.InstanceID, TenantID: w.TenantID,
		WorkspaceID: b.WorkspaceID,
		Details:     map[string]any{"epoch": b.Epoch, "placement": kind, "provider_id": b.ProviderID},
	})
	if err != nil {
		return err
	}
	if err := allocation.AnnounceOrphans(ctx, tx, b.WorkspaceID, b.Epoch); err != nil {
		return err
	}
	return freeCleaned(ctx, tx, b)
}

// freeCleaned releases an allocation whose release had failed, once no resource of it can remain.
func freeCleaned(ctx context.Context, tx pgx.Tx, b placement.Instance) error {
	a, ok, err := allocation.Live(ctx, tx, b.WorkspaceID)
	if err != nil || !ok || a.Epoch != b.Epoch || a.State != commonv1.AllocationState_ALLOCATION_STATE_RELEASE_FAILED {
		return err
	}
	if left, err := allocation.CountOrphans(ctx, tx, b.WorkspaceID, a.Epoch); err != nil || left > 0 {
		return err
	}
	if a, err = allocation.Set(ctx, tx, a, commonv1.AllocationState_ALLOCATION_STATE_RELEASED, "none"); err != nil ||
		a.NodeID == "" {
		return err
	}
	return allocation.UncordonIfClean(ctx, tx, a.NodeID)
}

var insertEndedInstance = pg.Define(pg.RoleLifecycle, "reap.insert_ended_instance", `
		INSERT INTO lifecycle.instance AS i (instance_id, workspace_id, tenant_id, epoch, state, placement, provider_id,
			started_at, ended_at, end_reason, version)
		VALUES ($1, $2, $3, $4, 'ended', $5, $6, $7, mesh.clock(), $8, $9) RETURNING `+allocation.InstanceColumns)

// insertEnded inserts the row of an instance that was never recorded, as ended.
func insertEnded(ctx context.Context, tx pgx.Tx, kind commonv1.PlacementDriver, b placement.Instance, tenantID,
	why string,
) error {
	id, version, err := allocation.AccountFor(ctx, tx, kind, b)
	if err != nil {
		return err
	}
	var started *time.Time
	if !b.StartedAt.IsZero() {
		started = &b.StartedAt
	}
	i, err := allocation.OneInstance(ctx, tx, insertEndedInstance,
		id, b.WorkspaceID, tenantID, b.Epoch, names.Of(kind), b.ProviderID, started, "orphan: "+why, version+1)
	if err != nil {
		return fmt.Errorf("insert ended instance: %w", err)
	}
	return announce(ctx, tx, i)
}

var endInstanceAgain = pg.Define(pg.RoleLifecycle, "reap.end_instance_again", `
		UPDATE lifecycle.instance i SET end_reason = $2, ended_at = mesh.clock(), version = i.version + 1
		WHERE i.instance_id = $1 AND i.state = 'ended' RETURNING `+allocation.InstanceColumns)

func announceAgain(ctx context.Context, tx pgx.Tx, i allocation.Instance, why string) error {
	again, err := allocation.OneInstance(ctx, tx, endInstanceAgain, i.ID, "orphan: "+why)
	if err != nil {
		return fmt.Errorf("change ended instance: %w", err)
	}
	return announce(ctx, tx, again)
}

func announce(ctx context.Context, tx pgx.Tx, i allocation.Instance) error {
	if _, err := events.Append(ctx, tx, i.Event()); err != nil {
		return fmt.Errorf("report instance: %w", err)
	}
	return nil
}
