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

// InstanceEnded is the recorded evidence that orphans on an instance are gone.
const InstanceEnded = "its instance has ended"

// instanceFields are the columns of instance that are read as they are stored.
type instanceFields struct {
	ID            string     `db:"instance_id" expr:"@.instance_id::text"`
	WorkspaceID   string     `db:"workspace_id" expr:"@.workspace_id::text"`
	TenantID      string     `db:"tenant_id" expr:"@.tenant_id::text"`
	Epoch         int64      `db:"epoch"`
	ProviderID    string     `db:"provider_id"`
	NodeID        string     `db:"node_id" expr:"coalesce(@.node_id::text, '')"`
	StartedAt     *time.Time `db:"started_at"`
	EndedAt       *time.Time `db:"ended_at"`
	EndReason     string     `db:"end_reason"`
	WorkspaceName string     `db:"workspace_name" expr:"(SELECT w.name FROM lifecycle.workspace w WHERE w.id = @.workspace_id)"`
	Version       int64      `db:"version"`
}

// Instance is a row of instance.
type Instance struct {
	instanceFields

	State     commonv1.InstanceState
	Placement commonv1.PlacementDriver
}

// storedInstance is an instance as it is read.
type storedInstance struct {
	instanceFields

	State     string `db:"state"`
	Placement string `db:"placement"`
}

// InstanceColumns are the columns of lifecycle.instance, of the alias i, as OneInstance reads them.
var InstanceColumns = pg.Columns[storedInstance]("i")

func (d storedInstance) instance() (Instance, error) {
	i := Instance{instanceFields: d.instanceFields}
	var err error
	if i.State, err = names.Parse[commonv1.InstanceState](d.State); err != nil {
		return Instance{}, fmt.Errorf("read instance: %w", err)
	}
	if i.Placement, err = names.Parse[commonv1.PlacementDriver](d.Placement); err != nil {
		return Instance{}, fmt.Errorf("read instance: %w", err)
	}
	return i, nil
}

// OneInstance runs a statement that returns one instance. Without a row the error is pgx.ErrNoRows.
func OneInstance(ctx context.Context, q pg.Querier, s *pg.Statement, args ...any) (Instance, error) {
	d, err := pg.One[storedInstance](ctx, q, s, args...)
	if err != nil {
		return Instance{}, err
	}
	i, err := d.instance()
	aside.Note(ctx, "instance", d.ID, err)
	return i, err
}

// Event returns the event of the instance as it is now.
func (i Instance) Event() events.Event {
	p := &lifecyclev1.Instance{
		InstanceId: i.ID, WorkspaceId: i.WorkspaceID, WorkspaceName: i.WorkspaceName, TenantId: i.TenantID, Epoch: i.Epoch,
		State: i.State, Placement: i.Placement, ProviderId: i.ProviderID, NodeId: i.NodeID, EndReason: i.EndReason,
		Version: i.Version,
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

var instanceByEpoch = pg.Define(pg.RoleLifecycle, "allocation.instance_by_epoch",
	`SELECT `+InstanceColumns+` FROM lifecycle.instance i WHERE i.workspace_id = $1 AND i.epoch = $2`)

// InstanceOf reads the instance of one epoch; the bool is false if there is none.
func InstanceOf(ctx context.Context, q pg.Querier, workspaceID string, epoch int64) (Instance, bool, error) {
	i, err := OneInstance(ctx, q, instanceByEpoch, workspaceID, epoch)
	if errors.Is(err, pgx.ErrNoRows) {
		return Instance{}, false, nil
	}
	if err != nil {
		return Instance{}, false, fmt.Errorf("read instance: %w", err)
	}
	return i, true, nil
}

var changeInstance = pg.Define(pg.RoleLifecycle, "allocation.change_instance", `
		UPDATE lifecycle.instance i
			SET state = $3, provider_id = coalesce(nullif($4, ''), i.provider_id),
			node_id = coalesce(nullif($5, '')::uuid, i.node_id),
			end_reason = coalesce(nullif($6, ''), i.end_reason),
			started_at = CASE WHEN $3 = 'live' AND i.started_at IS NULL THEN mesh.clock() ELSE i.started_at END,
			ended_at = CASE WHEN $3 = 'ended' AND i.ended_at IS NULL THEN mesh.clock() ELSE i.ended_at
				END, version = i.version + 1
		WHERE i.instance_id = $1 AND i.state = $2 RETURNING `+InstanceColumns)

// SetInstance changes an instance by compare-and-set, and appends its event. Empty strings leave the stored values.
func SetInstance(ctx context.Context, tx pgx.Tx, i Instance, state commonv1.InstanceState, providerID, nodeID,
	endReason string,
) (Instance, error) {
	moved, err := OneInstance(ctx, tx, changeInstance,
		i.ID, names.Of(i.State), names.Of(state), providerID, nodeID, endReason)
	if errors.Is(err, pgx.ErrNoRows) {
		return Instance{}, fault.New(commonv1.Reason_REASON_CONFLICT, "the instance changed meanwhile")
	}
	if err != nil {
		return Instance{}, fmt.Errorf("change instance: %w", err)
	}
	if _, err := events.Append(ctx, tx, moved.Event()); err != nil {
		return Instance{}, fmt.Errorf("report instance: %w", err)
	}
	return moved, nil
}
