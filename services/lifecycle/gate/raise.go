package gate

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/encoding/protojson"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
)

// session is a row of the argument of raiseGates.
type session struct {
	NodeID     string          `json:"node_id"`
	Generation int64           `json:"generation"`
	SessionID  string          `json:"session_id"`
	LedgerID   string          `json:"ledger_id"`
	InstanceID string          `json:"node_instance_id"`
	TaskTypes  []string        `json:"task_types"`
	TaskKeys   []string        `json:"task_keys"`
	Host       json.RawMessage `json:"host"`
}

var raiseGates = pg.Define(pg.RoleLifecycle, "gate.raise", `
	UPDATE lifecycle.node_gate g SET session_epoch = n.generation, session_id = n.session_id, session_open = true,
		replica_id = nullif($2, '')::uuid,
		session_ready_at = mesh.clock(), ledger_id = n.ledger_id, node_instance_id = n.node_instance_id,
		task_types = n.task_types, task_keys = nullif(n.task_keys, '{}'), task_keys_epoch = n.generation,
		host = CASE WHEN n.host = '{}' THEN g.host ELSE n.host END, version = g.version + 1
	FROM jsonb_to_recordset($1::jsonb) AS n (node_id uuid, generation bigint, session_id uuid, ledger_id uuid,
		node_instance_id uuid, task_types text[], task_keys text[], host jsonb)
	WHERE g.node_id = n.node_id AND g.session_epoch <= n.generation
	RETURNING `+columns)

// raiseRows raises the gates of sessions of different nodes, which the caller has checked under the gates' locks, and
// returns the gates by node.
func raiseRows(ctx context.Context, tx pgx.Tx, replicaID string, sessions ...*lifecyclev1.SessionReady) (
	map[string]Gate, error,
) {
	rows := make([]session, 0, len(sessions))
	for _, r := range sessions {
		host, err := protojson.Marshal(orEmpty(r.GetHost()))
		if err != nil {
			return nil, fmt.Errorf("encode host facts: %w", err)
		}
		row := session{
			NodeID: r.GetNodeId(), Generation: r.GetGeneration(), SessionID: r.GetSessionId(), LedgerID: r.GetLedgerId(),
			InstanceID: r.GetNodeInstanceId(), TaskTypes: make([]string, 0, len(r.GetTaskTypes())),
			TaskKeys: r.GetTaskKeyIds(), Host: host,
		}
		for _, t := range r.GetTaskTypes() {
			row.TaskTypes = append(row.TaskTypes, names.Of(t))
		}
		rows = append(rows, row)
	}
	encoded, err := json.Marshal(rows)
	if err != nil {
		return nil, fmt.Errorf("encode sessions: %w", err)
	}
	list, err := all(ctx, tx, raiseGates, string(encoded), replicaID)
	if err != nil {
		return nil, fmt.Errorf("raise gates: %w", err)
	}
	out := make(map[string]Gate, len(list))
	for _, g := range list {
		out[g.NodeID] = g
	}
	for _, r := range sessions {
		if _, ok := out[r.GetNodeId()]; !ok {
			return nil, fmt.Errorf("raise gates: that of node %s changed under its lock", r.GetNodeId())
		}
	}
	return out, nil
}

// raiseMachines raises, in one statement, the gates of those sessions of a batch that do not depend on the others: the
// first of each machine, if it is accepted. It returns them by their place in the batch. A launched instance is not
// among them, since its workspace may refuse it.
func (s *Server) raiseMachines(ctx context.Context, tx pgx.Tx, gates map[string]Gate, replicaID string,
	sessions []*lifecyclev1.SessionReady,
) (map[int]Gate, error) {
	seen := make(map[string]bool, len(sessions))
	var accepted []*lifecyclev1.SessionReady
	var places []int
	for i, r := range sessions {
		g := gates[r.GetNodeId()]
		if !seen[r.GetNodeId()] && g.InstanceID == "" && s.check(g, r) == nil {
			accepted, places = append(accepted, r), append(places, i)
		}
		seen[r.GetNodeId()] = true
	}
	if len(accepted) == 0 {
		return map[int]Gate{}, nil
	}
	raised, err := raiseRows(ctx, tx, replicaID, accepted...)
	if err != nil {
		return nil, err
	}
	out := make(map[int]Gate, len(accepted))
	for i, r := range accepted {
		out[places[i]] = raised[r.GetNodeId()]
	}
	return out, nil
}

func orEmpty(h *commonv1.HostFacts) *commonv1.HostFacts {
	if h == nil {
		return &commonv1.HostFacts{}
	}
	return h
}
