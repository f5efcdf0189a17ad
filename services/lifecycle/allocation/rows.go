package allocation

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
)

// allocationFields are the columns of allocation that are read as they are stored.
type allocationFields struct {
	ID              string     `db:"allocation_id" expr:"@.allocation_id::text"`
	WorkspaceID     string     `db:"workspace_id" expr:"@.workspace_id::text"`
	TenantID        string     `db:"tenant_id" expr:"@.tenant_id::text"`
	Epoch           int64      `db:"epoch"`
	NodeID          string     `db:"node_id" expr:"coalesce(@.node_id::text, '')"`
	InstanceID      string     `db:"instance_id" expr:"coalesce(@.instance_id::text, '')"`
	GPUs            int32      `db:"gpus"`
	Occupancy       string     `db:"occupancy"`
	LastError       string     `db:"last_error"`
	CreatedAt       time.Time  `db:"created_at"`
	StateAt         time.Time  `db:"state_at"`
	Devices         []string   `db:"devices" expr:"ARRAY(SELECT h.device_id FROM lifecycle.gpu_hold h WHERE h.allocation_id = @.allocation_id ORDER BY h.device_id)"`
	Fence           int64      `db:"fence"`
	ReleaseDeadline *time.Time `db:"release_deadline_at"`
	// Orphans were given up in its epoch and are not reaped.
	Orphans int32 `db:"orphans" expr:"(SELECT count(*) FROM lifecycle.resource_claim o WHERE o.workspace_id = @.workspace_id AND o.epoch = @.epoch AND o.orphaned_at IS NOT NULL AND o.released_at IS NULL)::integer"`
	Version int64 `db:"version"`
}

// Allocation is a row of allocation.
type Allocation struct {
	allocationFields

	State     commonv1.AllocationState
	Placement commonv1.PlacementDriver
}

// storedAllocation is an allocation as it is read.
type storedAllocation struct {
	allocationFields

	State     string `db:"state"`
	Placement string `db:"placement"`
}

// Columns are the columns of lifecycle.allocation, of the alias a, as One and All read them.
var Columns = pg.Columns[storedAllocation]("a")

func (d storedAllocation) allocation() (Allocation, error) {
	a := Allocation{allocationFields: d.allocationFields}
	var err error
	if a.State, err = names.Parse[commonv1.AllocationState](d.State); err != nil {
		return Allocation{}, fmt.Errorf("read allocation: %w", err)
	}
	if a.Placement, err = names.Parse[commonv1.PlacementDriver](d.Placement); err != nil {
		return Allocation{}, fmt.Errorf("read allocation: %w", err)
	}
	return a, nil
}

// One runs a statement that returns one allocation. Without a row the error is pgx.ErrNoRows. One with a value that
// this build does not know is an error, which package aside reports.
func One(ctx context.Context, q pg.Querier, s *pg.Statement, args ...any) (Allocation, error) {
	d, err := pg.One[storedAllocation](ctx, q, s, args...)
	if err != nil {
		return Allocation{}, err
	}
	a, err := d.allocation()
	aside.Note(ctx, "allocation", d.ID, err)
	return a, err
}

// All runs a statement that returns allocations.
func All(ctx context.Context, q pg.Querier, s *pg.Statement, args ...any) ([]Allocation, error) {
	list, err := pg.All[storedAllocation](ctx, q, s, args...)
	if err != nil {
		return nil, err
	}
	return aside.Rows(ctx, "allocation", list, func(d storedAllocation) string { return d.ID },
		storedAllocation.allocation)
}

// Proto returns the allocation as the API and its event show it.
func (a Allocation) Proto() *lifecyclev1.Allocation {
	p := &lifecyclev1.Allocation{
		AllocationId: a.ID, WorkspaceId: a.WorkspaceID, TenantId: a.TenantID, Epoch: a.Epoch, State: a.State,
		NodeId: a.NodeID, InstanceId: a.InstanceID, GpuDeviceIds: a.Devices, Occupancy: a.Occupancy, Placement: a.Placement,
		CreatedAt: timestamppb.New(a.CreatedAt), StateAt: timestamppb.New(a.StateAt), LastError: a.LastError, Fence: a.Fence,
		Orphans: a.Orphans, Version: a.Version,
	}
	if a.ReleaseDeadline != nil {
		p.ReleaseDeadlineAt = timestamppb.New(*a.ReleaseDeadline)
	}
	return p
}

// Event returns the event of the allocation as it is now.
func (a Allocation) Event() events.Event {
	return events.Event{
		Kind: "allocation.changed", AggregateType: "allocation", AggregateID: a.ID, AggregateVersion: a.Version,
		Payload: a.Proto(),
		Correlation: events.Correlation{
			TenantID: a.TenantID, WorkspaceID: a.WorkspaceID, AllocationID: a.ID,
			NodeID: a.NodeID,
		},
	}
}

var liveAllocationOf = pg.Define(pg.RoleLifecycle, "allocation.live_allocation_of",
	`SELECT `+Columns+` FROM lifecycle.allocation a WHERE a.workspace_id = $1 AND a.state <> 'released'`)

// Live reads the workspace's live allocation; the bool is false if it has none.
func Live(ctx context.Context, q pg.Querier, workspaceID string) (Allocation, bool, error) {
	a, err := One(ctx, q, liveAllocationOf, workspaceID)
	if errors.Is(err, pgx.ErrNoRows) {
		return Allocation{}, false, nil
	}
	if err != nil {
		return Allocation{}, false, fmt.Errorf("read allocation: %w", err)
	}
	return a, true, nil
}

// Set changes the state of an allocation by compare-and-set, and appends its event.
func Set(ctx context.Context, tx pgx.Tx, a Allocation, state commonv1.AllocationState,
	occupancy string,
) (Allocation, error) {
	return Transition(ctx, tx, a, Change{State: state, Occupancy: occupancy})
}

// Change is a change of an allocation's state.
type Change struct {
	State         commonv1.AllocationState
	Occupancy     string
	why           string        // of a release that failed
	ReleaseWithin time.Duration // of a release that begins
}

var freeDevices = pg.Define(pg.RoleLifecycle, "allocation.free_devices",
	`DELETE FROM lifecycle.gpu_hold WHERE allocation_id = $1`)

var changeAllocation = pg.Define(pg.RoleLifecycle, "allocation.change_allocation", `
		UPDATE lifecycle.allocation a
			SET state = $3, occupancy = $4, state_at = mesh.clock(), last_error = $5, fence = mesh.next(a.fence),
			release_deadline_at = CASE WHEN $6::float8 > 0 THEN mesh.clock() + make_interval(secs => $6)
				END, version = a.version + 1
		WHERE a.allocation_id = $1 AND a.state = $2 RETURNING `+Columns)

// Transition changes the state of an allocation by compare-and-set, and appends its event. It frees the devices of one
// that is released.
func Transition(ctx context.Context, tx pgx.Tx, a Allocation, m Change) (Allocation, error) {
	if m.State == commonv1.AllocationState_ALLOCATION_STATE_RELEASED {
		if _, err := pg.Exec(ctx, tx, freeDevices, a.ID); err != nil {
			return Allocation{}, fmt.Errorf("free devices: %w", err)
		}
	}
	moved, err := One(ctx, tx, changeAllocation,
		a.ID, names.Of(a.State), names.Of(m.State), m.Occupancy, m.why, m.ReleaseWithin.Seconds())
	if errors.Is(err, pgx.ErrNoRows) {
		return Allocation{}, fault.New(commonv1.Reason_REASON_CONFLICT, "the allocation changed meanwhile")
	}
	if err != nil {
		return Allocation{}, fmt.Errorf("change allocation: %w", err)
	}
	if _, err := events.Append(ctx, tx, moved.Event()); err != nil {
		return Allocation{}, fmt.Errorf("report allocation: %w", err)
	}
	return moved, releaseFailed(ctx, tx, moved)
}
