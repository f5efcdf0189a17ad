package allocation

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/spec"
)

// Free releases the workspace's allocation after all that it held was cleaned. If resources were given up and are not
// reaped, it becomes release_failed instead.
func Free(ctx context.Context, tx pgx.Tx, workspaceID string) error {
	live, ok, err := Live(ctx, tx, workspaceID)
	if err != nil || !ok {
		return err
	}
	left, err := CountOrphans(ctx, tx, workspaceID, live.Epoch)
	if err != nil {
		return err
	}
	if left > 0 {
		// Resources that could not be cleaned may still use the slot and the devices: those stay allocated, visible and
		// never placeable, until the resources are reaped.
		return FailRelease(ctx, tx, live, fmt.Sprintf("%d resources were given up and are not reaped yet", left))
	}
	if live, err = Set(ctx, tx, live, commonv1.AllocationState_ALLOCATION_STATE_RELEASED,
		"none"); err != nil ||
		live.NodeID == "" {
		return err
	}
	return UncordonIfClean(ctx, tx, live.NodeID)
}

// BeginRelease makes an allocation releasing, with a deadline that is within from now. With an instance of its own it
// gets no less than the steps wait for its agent.
func BeginRelease(ctx context.Context, tx pgx.Tx, a Allocation, within time.Duration) error {
	if placement.HasOwnInstance(a.Placement) {
		within = max(within, InstanceRelease)
	}
	_, err := Transition(ctx, tx, a, Change{
		State: commonv1.AllocationState_ALLOCATION_STATE_RELEASING, Occupancy: "cleanup", ReleaseWithin: within,
	})
	return err
}

// FailStuck makes the allocation of a workspace release_failed if it was being released and its run is stuck: no run
// goes on with that release.
func FailStuck(ctx context.Context, tx pgx.Tx, workspaceID string, why *saga.StepError) error {
	a, ok, err := Live(ctx, tx, workspaceID)
	if err != nil || !ok || a.State != commonv1.AllocationState_ALLOCATION_STATE_RELEASING {
		return err
	}
	return FailRelease(ctx, tx, a, why.Public)
}

var releaseTimeLeft = pg.Define(pg.RoleLifecycle, "allocation.release_time_left", `
		SELECT coalesce((SELECT extract(epoch FROM release_deadline_at - mesh.clock()) FROM lifecycle.allocation
			WHERE workspace_id = $1 AND state = 'releasing'), 3600)::float8`)

// TimeLeft returns how long the release of the workspace's allocation may still take, by the database's clock; below
// zero once it is late, and an hour if no allocation of the workspace is being released.
func TimeLeft(ctx context.Context, q pg.Querier, workspaceID string) (time.Duration, error) {
	var left float64
	err := pg.QueryRow(ctx, q, releaseTimeLeft, workspaceID).Scan(&left)
	if err != nil {
		return 0, fmt.Errorf("read deadline of release: %w", err)
	}
	return time.Duration(left * float64(time.Second)), nil
}

var releaseIsLate = pg.Define(pg.RoleLifecycle, "allocation.release_is_late", `
		SELECT EXISTS (SELECT 1 FROM lifecycle.allocation WHERE workspace_id = $1
			AND (state = 'release_failed' OR state = 'releasing' AND release_deadline_at <= mesh.clock()))`)

// Late reports whether the release of the workspace's allocation is past its deadline, or the sweep has found it
// late meanwhile.
func Late(ctx context.Context, q pg.Querier, workspaceID string) bool {
	var late bool
	err := pg.QueryRow(ctx, q, releaseIsLate, workspaceID).Scan(&late)
	return err == nil && late
}

// FreeForced ends a forced release: the allocation is released, and its machine cordoned for as long as something
// was left there.
func FreeForced(ctx context.Context, tx pgx.Tx, workspaceID string, w *spec.Attestation) error {
	a, held, err := Live(ctx, tx, workspaceID)
	if err != nil || !held {
		return err
	}
	i, ok, err := InstanceOf(ctx, tx, workspaceID, a.Epoch)
	if err != nil {
		return err
	}
	if ok && i.State != commonv1.InstanceState_INSTANCE_STATE_ENDED {
		if _, err := SetInstance(ctx, tx, i, commonv1.InstanceState_INSTANCE_STATE_ENDED, "", "",
			"force-released: "+w.String()); err != nil {
			return err
		}
	}
	if _, err := Set(ctx, tx, a, commonv1.AllocationState_ALLOCATION_STATE_RELEASED, "none"); err != nil {
		return err
	}
	left, err := CountOrphans(ctx, tx, workspaceID, a.Epoch)
	if err != nil || a.NodeID == "" {
		return err
	}
	if left == 0 {
		return UncordonIfClean(ctx, tx, a.NodeID)
	}
	reason := fmt.Sprintf("allocation %s was force-released by %s and has left %d orphans here", a.ID, w.String(), left)
	if _, err := gate.CordonUnlessIs(ctx, tx, a.NodeID, reason, CordonOwner); err != nil {
		return fmt.Errorf("cordon node: %w", err)
	}
	return nil
}

var moveReleaseDeadlines = pg.Define(pg.RoleLifecycle, "allocation.move_release_deadlines", `
		UPDATE lifecycle.allocation a
			SET release_deadline_at = a.release_deadline_at + make_interval(secs => x.stood), version = a.version + 1
		FROM unnest($1::uuid[], $2::float8[]) AS x (workspace_id, stood)
		WHERE a.workspace_id = x.workspace_id AND a.state = 'releasing' AND a.release_deadline_at IS NOT NULL
			RETURNING `+Columns)

// MoveDeadlines moves the deadlines of the releases of workspaces forward, each by the seconds for which its run stood.
func MoveDeadlines(ctx context.Context, tx pgx.Tx, workspaces []string, stood []float64) error {
	moved, err := All(ctx, tx, moveReleaseDeadlines, workspaces, stood)
	if err != nil {
		return fmt.Errorf("move deadlines of releases: %w", err)
	}
	return Announce(ctx, tx, moved)
}
