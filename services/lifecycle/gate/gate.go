// Package gate keeps the gate of each node: whether it may be given work, and through which session.
//
// It trusts recovery's fences, of which the highest fence epoch wins, and a join state signed by recovery for the
// session that counts; nodeapi only carries both. Every lease of tasks and every report of results locks the gate's
// row, so that no dispatch commits after a fence has. It never decides whether a node is healthy, and never touches
// identity.
package gate

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
)

// Gate is one row.
type Gate struct {
	NodeID         string              `db:"node_id" expr:"@.node_id::text"`
	InstanceOfNode string              `db:"node_instance_id" expr:"coalesce(@.node_instance_id::text, '')"`
	Name           string              `db:"name"`
	FenceEpoch     int64               `db:"fence_epoch"`
	Admitted       bool                `db:"admitted"`
	Retired        bool                `db:"retired"`
	SessionEpoch   int64               `db:"session_epoch"`
	SessionID      string              `db:"session_id" expr:"coalesce(@.session_id::text, '')"`
	SessionOpen    bool                `db:"session_open"`
	ReplicaID      string              `db:"replica_id" expr:"coalesce(@.replica_id::text, '')"`
	SessionReadyAt *time.Time          `db:"session_ready_at"`
	LedgerID       string              `db:"ledger_id" expr:"coalesce(@.ledger_id::text, '')"`
	Cordoned       bool                `db:"cordoned"`
	CordonReason   string              `db:"cordon_reason"`
	CordonedBy     string              `db:"cordoned_by"`
	InstanceID     string              `db:"instance_id" expr:"coalesce(@.instance_id::text, '')"`
	WorkspaceID    string              `db:"workspace_id" expr:"coalesce(@.workspace_id::text, '')"`
	Epoch          int64               `db:"epoch"`
	Slots          int32               `db:"slots"`
	TaskTypes      []string            `db:"task_types"`
	Host           *commonv1.HostFacts `db:"-"`
	Version        int64               `db:"version"`

	// WaitingCordon is why the node is to be cordoned, if that cordon waits because it is one of too many.
	WaitingCordon      string     `db:"waiting_cordon"`
	WaitingCordonSince *time.Time `db:"waiting_cordon_since"`
}

// Proto returns the gate as events and responses show it.
func (g Gate) Proto() *lifecyclev1.NodeGate {
	p := &lifecyclev1.NodeGate{
		NodeId: g.NodeID, NodeInstanceId: g.InstanceOfNode, Name: g.Name, FenceEpoch: g.FenceEpoch, Admitted: g.Admitted,
		SessionEpoch: g.SessionEpoch, Cordoned: g.Cordoned, CordonReason: g.CordonReason, CordonedBy: g.CordonedBy,
		LedgerId: g.LedgerID,
		Slots:    g.Slots, Gpus: int32(len(g.Host.GetGpus())), // devices of one host
		InstanceId: g.InstanceID, WorkspaceId: g.WorkspaceID, Host: g.Host, Version: g.Version,
		WaitingCordon: g.WaitingCordon,
	}
	if g.WaitingCordonSince != nil {
		p.WaitingCordonSince = timestamppb.New(*g.WaitingCordonSince)
	}
	if g.SessionReadyAt != nil {
		p.SessionReadyAt = timestamppb.New(*g.SessionReadyAt)
	}
	for _, t := range g.TaskTypes { // one that this build does not know is reported once, and not for each node
		if v := aside.Value[commonv1.TaskType]("gate", t, t); v != commonv1.TaskType_TASK_TYPE_UNSPECIFIED {
			p.TaskTypes = append(p.TaskTypes, v)
		}
	}
	return p
}

func (g Gate) event() events.Event {
	return events.Event{
		Kind: "gate.changed", AggregateType: "gate", AggregateID: g.NodeID, AggregateVersion: g.Version, Payload: g.Proto(),
		Correlation: events.Correlation{NodeID: g.NodeID, NodeInstanceID: g.InstanceOfNode, WorkspaceID: g.WorkspaceID},
	}
}

// eventOf returns the event of a change that a call or an event has caused, with its correlation id.
func (g Gate) eventOf(ctx context.Context) events.Event {
	e := g.event()
	e.CorrelationID = obs.From(ctx).CorrelationID
	return e
}

// lockUpdate reads gates for a change, in the order of their ids.
func lockUpdate(ctx context.Context, tx pgx.Tx, nodeIDs []string) (map[string]Gate, error) {
	list, err := all(ctx, tx, lockGates, nodeIDs)
	if err != nil {
		return nil, fmt.Errorf("lock gates: %w", err)
	}
	out := make(map[string]Gate, len(list))
	for _, g := range list {
		out[g.NodeID] = g
	}
	return out, nil
}

// Get reads one gate without a lock. The bool is false if there is none.
func Get(ctx context.Context, q pg.Querier, nodeID string) (Gate, bool, error) {
	g, err := one(ctx, q, getGate, nodeID)
	if pg.IsNoRows(err) {
		return Gate{}, false, nil
	}
	if err != nil {
		return Gate{}, false, fmt.Errorf("read gate: %w", err)
	}
	return g, true, nil
}
