package workspace

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
)

// allocation is a row of allocation.
type allocation struct {
	ID, WorkspaceID, TenantID string
	Epoch                     int64
	State                     commonv1.AllocationState
	Placement                 commonv1.PlacementDriver
	NodeID, InstanceID        string
	GPUs                      int32
	Occupancy, LastError      string
	CreatedAt, StateAt        time.Time
	Devices                   []string
	Fence                     int64
	ReleaseDeadline           *time.Time
	Orphans                   int32 // given up in its epoch and not reaped
	Version                   int64
}

const allocationColumns = `a.allocation_id::text, a.workspace_id::text, a.tenant_id::text, a.epoch, a.state, a.placement, coalesce(a.node_id::text, ''),
	coalesce(a.instance_id::text, ''), a.gpus, a.occupancy, a.last_error, a.created_at, a.state_at,
	ARRAY(SELECT h.device_id FROM lifecycle.gpu_hold h WHERE h.allocation_id = a.allocation_id ORDER BY h.device_id), a.fence,
	a.release_deadline_at, (SELECT count(*) FROM lifecycle.resource_claim o WHERE o.workspace_id = a.workspace_id AND o.epoch = a.epoch
		AND o.orphaned_at IS NOT NULL AND o.released_at IS NULL)::integer, a.version`

func scanAllocation(row pgx.Row) (allocation, error) {
	var a allocation
	var state, where string
	err := row.Scan(&a.ID, &a.WorkspaceID, &a.TenantID, &a.Epoch, &state, &where, &a.NodeID, &a.InstanceID, &a.GPUs, &a.Occupancy, &a.LastError,
		&a.CreatedAt, &a.StateAt, &a.Devices, &a.Fence, &a.ReleaseDeadline, &a.Orphans, &a.Version)
	if err != nil {
		return allocation{}, err //nolint:wrapcheck // the caller says what it read
	}
	if a.State, err = names.Parse[commonv1.AllocationState](state); err != nil {
		return allocation{}, fmt.Errorf("read allocation: %w", err)
	}
	if a.Placement, err = names.Parse[commonv1.PlacementDriver](where); err != nil {
		return allocation{}, fmt.Errorf("read allocation: %w", err)
	}
	return a, nil
}

func (a allocation) proto() *lifecyclev1.Allocation {
	p := &lifecyclev1.Allocation{
		AllocationId: a.ID, WorkspaceId: a.WorkspaceID, TenantId: a.TenantID, Epoch: a.Epoch, State: a.State, NodeId: a.NodeID, InstanceId: a.InstanceID,
		GpuDeviceIds: a.Devices, Occupancy: a.Occupancy, Placement: a.Placement, CreatedAt: timestamppb.New(a.CreatedAt),
		StateAt: timestamppb.New(a.StateAt), LastError: a.LastError, Fence: a.Fence, Orphans: a.Orphans, Version: a.Version,
	}
	if a.ReleaseDeadline != nil {
		p.ReleaseDeadlineAt = timestamppb.New(*a.ReleaseDeadline)
	}
	return p
}

func (a allocation) event() events.Event {
	return events.Event{
		Kind: "allocation.changed", AggregateType: "allocation", AggregateID: a.ID, AggregateVersion: a.Version, Payload: a.proto(),
		Correlation: events.Correlation{TenantID: a.TenantID, WorkspaceID: a.WorkspaceID, AllocationID: a.ID, NodeID: a.NodeID},
	}
}

var liveAllocationOf = pg.Define(pg.RoleLifecycle, "workspace.live_allocation_of", `SELECT `+allocationColumns+` FROM lifecycle.allocation a WHERE a.workspace_id = $1 AND a.state <> 'released'`)

// liveAllocation reads the workspace's hold; the bool is false if it has none.
func liveAllocation(ctx context.Context, q pg.Querier, workspaceID string) (allocation, bool, error) {
	a, err := scanAllocation(pg.QueryRow(ctx, q, liveAllocationOf, workspaceID))
	if errors.Is(err, pgx.ErrNoRows) {
		return allocation{}, false, nil
	}
	if err != nil {
		return allocation{}, false, fmt.Errorf("read allocation: %w", err)
	}
	return a, true, nil
}

// setAllocation changes the state of a hold by compare-and-set, and reports it.
func setAllocation(ctx context.Context, tx pgx.Tx, a allocation, state commonv1.AllocationState, occupancy string) (allocation, error) {
	return moveAllocation(ctx, tx, a, allocationMove{state: state, occupancy: occupancy})
}

// allocationMove is a change of a hold's state.
type allocationMove struct {
	state     commonv1.AllocationState
	occupancy string
	why       string        // of a release that failed
	deadline  time.Duration // of a release that begins
}

var freeDevices = pg.Define(pg.RoleLifecycle, "workspace.free_devices", `DELETE FROM lifecycle.gpu_hold WHERE allocation_id = $1`)

var changeAllocation = pg.Define(pg.RoleLifecycle, "workspace.change_allocation", `
		UPDATE lifecycle.allocation a SET seal = NULL, state = $3, occupancy = $4, state_at = mesh.clock(), last_error = $5, fence = mesh.next(a.fence),
			release_deadline_at = CASE WHEN $6::float8 > 0 THEN mesh.clock() + make_interval(secs => $6) END, version = a.version + 1
		WHERE a.allocation_id = $1 AND a.state = $2 RETURNING `+allocationColumns)

func moveAllocation(ctx context.Context, tx pgx.Tx, a allocation, m allocationMove) (allocation, error) {
	if m.state == commonv1.AllocationState_ALLOCATION_STATE_RELEASED {
		if _, err := pg.Exec(ctx, tx, freeDevices, a.ID); err != nil {
			return allocation{}, fmt.Errorf("free devices: %w", err)
		}
	}
	moved, err := scanAllocation(pg.QueryRow(ctx, tx, changeAllocation,
		a.ID, names.Of(a.State), names.Of(m.state), m.occupancy, m.why, m.deadline.Seconds()))
	if errors.Is(err, pgx.ErrNoRows) {
		return allocation{}, fault.New(commonv1.Reason_REASON_CONFLICT, "the allocation changed meanwhile")
	}
	if err != nil {
		return allocation{}, fmt.Errorf("change allocation: %w", err)
	}
	if _, err := events.Append(ctx, tx, moved.event()); err != nil {
		return allocation{}, fmt.Errorf("report allocation: %w", err)
	}
	return moved, releaseFailed(ctx, tx, moved)
}

// instance is a row of instance.
type instance struct {
	ID, WorkspaceID, TenantID string
	Epoch                     int64
	State                     commonv1.InstanceState
	Placement                 commonv1.PlacementDriver
	ProviderID, NodeID        string
	StartedAt, EndedAt        *time.Time
	EndReason                 string
	WorkspaceName             string
	Version                   int64
}

const instanceColumns = `i.instance_id::text, i.workspace_id::text, i.tenant_id::text, i.epoch, i.state, i.placement, i.provider_id,
	coalesce(i.node_id::text, ''), i.started_at, i.ended_at, i.end_reason, (SELECT w.name FROM lifecycle.workspace w WHERE w.id = i.workspace_id), i.version`

func scanInstance(row pgx.Row) (instance, error) {
	var i instance
	var state, where string
	err := row.Scan(&i.ID, &i.WorkspaceID, &i.TenantID, &i.Epoch, &state, &where, &i.ProviderID, &i.NodeID, &i.StartedAt, &i.EndedAt,
		&i.EndReason, &i.WorkspaceName, &i.Version)
	if err != nil {
		return instance{}, err //nolint:wrapcheck // the caller says what it read
	}
	if i.State, err = names.Parse[commonv1.InstanceState](state); err != nil {
		return instance{}, fmt.Errorf("read instance: %w", err)
	}
	if i.Placement, err = names.Parse[commonv1.PlacementDriver](where); err != nil {
		return instance{}, fmt.Errorf("read instance: %w", err)
	}
	return i, nil
}

func (i instance) event() events.Event {
	p := &lifecyclev1.Instance{
		InstanceId: i.ID, WorkspaceId: i.WorkspaceID, WorkspaceName: i.WorkspaceName, TenantId: i.TenantID, Epoch: i.Epoch, State: i.State,
		Placement: i.Placement, ProviderId: i.ProviderID, NodeId: i.NodeID, EndReason: i.EndReason, Version: i.Version,
	}
	if i.StartedAt != nil {
		p.StartedAt = timestamppb.New(*i.StartedAt)
	}
	if i.EndedAt != nil {
		p.EndedAt = timestamppb.New(*i.EndedAt)
	}
	return events.Event{
		Kind: "instance.changed", AggregateType: "instance", AggregateID: i.ID, AggregateVersion: i.Version, Payload: p,
		Correlation: events.Correlation{TenantID: i.TenantID, WorkspaceID: i.WorkspaceID, NodeID: i.NodeID},
	}
}

var instanceByEpoch = pg.Define(pg.RoleLifecycle, "workspace.instance_by_epoch", `SELECT `+instanceColumns+` FROM lifecycle.instance i WHERE i.workspace_id = $1 AND i.epoch = $2`)

// instanceOf reads the box of one epoch; the bool is false if there is none.
func instanceOf(ctx context.Context, q pg.Querier, workspaceID string, epoch int64) (instance, bool, error) {
	i, err := scanInstance(pg.QueryRow(ctx, q, instanceByEpoch, workspaceID, epoch))
	if errors.Is(err, pgx.ErrNoRows) {
		return instance{}, false, nil
	}
	if err != nil {
		return instance{}, false, fmt.Errorf("read instance: %w", err)
	}
	return i, true, nil
}

var changeInstance = pg.Define(pg.RoleLifecycle, "workspace.change_instance", `
		UPDATE lifecycle.instance i SET state = $3, provider_id = coalesce(nullif($4, ''), i.provider_id), node_id = coalesce(nullif($5, '')::uuid, i.node_id),
			end_reason = coalesce(nullif($6, ''), i.end_reason),
			started_at = CASE WHEN $3 = 'live' AND i.started_at IS NULL THEN mesh.clock() ELSE i.started_at END,
			ended_at = CASE WHEN $3 = 'ended' AND i.ended_at IS NULL THEN mesh.clock() ELSE i.ended_at END, version = i.version + 1
		WHERE i.instance_id = $1 AND i.state = $2 RETURNING `+instanceColumns)

// setInstance changes a box by compare-and-set, and reports it. Empty strings leave what is there.
func setInstance(ctx context.Context, tx pgx.Tx, i instance, state commonv1.InstanceState, providerID, nodeID, endReason string) (instance, error) {
	moved, err := scanInstance(pg.QueryRow(ctx, tx, changeInstance,
		i.ID, names.Of(i.State), names.Of(state), providerID, nodeID, endReason))
	if errors.Is(err, pgx.ErrNoRows) {
		return instance{}, fault.New(commonv1.Reason_REASON_CONFLICT, "the instance changed meanwhile")
	}
	if err != nil {
		return instance{}, fmt.Errorf("change instance: %w", err)
	}
	if _, err := events.Append(ctx, tx, moved.event()); err != nil {
		return instance{}, fmt.Errorf("report instance: %w", err)
	}
	return moved, nil
}
