// Package gate keeps the gate of each node: whether it may be given work, and through which session.
//
// It believes recovery for fences, highest fence epoch first, and a join state signed by recovery for the session that counts; nodeapi only carries
// them. Every lease of tasks and every report of results locks the gate's row, so no dispatch commits after a fence has.
// It never decides whether a node is healthy, and never touches identity.
package gate

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/names"
)

// Gate is one row.
type Gate struct {
	NodeID         string
	InstanceOfNode string
	Name           string
	FenceEpoch     int64
	Admitted       bool
	Retired        bool
	SessionEpoch   int64
	SessionID      string
	SessionOpen    bool
	ReplicaID      string
	SessionReadyAt *time.Time
	LedgerID       string
	Cordoned       bool
	CordonReason   string
	CordonedBy     string
	InstanceID     string
	WorkspaceID    string
	Epoch          int64
	Slots          int32
	TaskTypes      []string
	Host           *commonv1.HostFacts
	Version        int64
}

const columns = `node_id::text, coalesce(node_instance_id::text, ''), name, fence_epoch, admitted, retired, session_epoch, coalesce(session_id::text, ''),
	session_open, coalesce(replica_id::text, ''), session_ready_at, coalesce(ledger_id::text, ''), cordoned, cordon_reason, cordoned_by,
	coalesce(instance_id::text, ''), coalesce(workspace_id::text, ''), epoch, slots, task_types, host, version`

func scan(row pgx.Row) (Gate, error) {
	var g Gate
	var host []byte
	err := row.Scan(&g.NodeID, &g.InstanceOfNode, &g.Name, &g.FenceEpoch, &g.Admitted, &g.Retired, &g.SessionEpoch, &g.SessionID,
		&g.SessionOpen, &g.ReplicaID, &g.SessionReadyAt, &g.LedgerID, &g.Cordoned, &g.CordonReason, &g.CordonedBy,
		&g.InstanceID, &g.WorkspaceID, &g.Epoch, &g.Slots, &g.TaskTypes, &host, &g.Version)
	if err != nil {
		return Gate{}, err //nolint:wrapcheck // the caller says what it read
	}
	g.Host = &commonv1.HostFacts{}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(host, g.Host); err != nil {
		return Gate{}, fmt.Errorf("read host facts of node %s: %w", g.NodeID, err)
	}
	return g, nil
}

// Proto is the gate as events and answers show it.
func (g Gate) Proto() *lifecyclev1.NodeGate {
	p := &lifecyclev1.NodeGate{
		NodeId: g.NodeID, NodeInstanceId: g.InstanceOfNode, Name: g.Name, FenceEpoch: g.FenceEpoch, Admitted: g.Admitted,
		SessionEpoch: g.SessionEpoch, Cordoned: g.Cordoned, CordonReason: g.CordonReason, CordonedBy: g.CordonedBy, LedgerId: g.LedgerID,
		Slots: g.Slots, Gpus: int32(len(g.Host.GetGpus())), //nolint:gosec // devices of one host
		InstanceId: g.InstanceID, WorkspaceId: g.WorkspaceID, Host: g.Host, Version: g.Version,
	}
	if g.SessionReadyAt != nil {
		p.SessionReadyAt = timestamppb.New(*g.SessionReadyAt)
	}
	for _, t := range g.TaskTypes {
		if v, err := names.Parse[commonv1.TaskType](t); err == nil {
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

// lockUpdate reads gates for a change, in the order of their ids.
func lockUpdate(ctx context.Context, tx pgx.Tx, nodeIDs []string) (map[string]Gate, error) {
	rows, err := tx.Query(ctx, `SELECT `+columns+` FROM lifecycle.node_gate WHERE node_id = ANY($1::uuid[]) ORDER BY node_id FOR NO KEY UPDATE`, nodeIDs)
	if err != nil {
		return nil, fmt.Errorf("lock gates: %w", err)
	}
	defer rows.Close()
	out := make(map[string]Gate, len(nodeIDs))
	for rows.Next() {
		g, err := scan(rows)
		if err != nil {
			return nil, fmt.Errorf("read gate: %w", err)
		}
		out[g.NodeID] = g
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("lock gates: %w", err)
	}
	return out, nil
}

// Get reads one gate without a lock. The bool is false if there is none.
func Get(ctx context.Context, q interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}, nodeID string,
) (Gate, bool, error) {
	g, err := scan(q.QueryRow(ctx, `SELECT `+columns+` FROM lifecycle.node_gate WHERE node_id = $1`, nodeID))
	if err == pgx.ErrNoRows { //nolint:errorlint // pgx answers it bare
		return Gate{}, false, nil
	}
	if err != nil {
		return Gate{}, false, fmt.Errorf("read gate: %w", err)
	}
	return g, true, nil
}
