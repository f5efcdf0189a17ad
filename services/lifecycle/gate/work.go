package gate

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// Brief is what a lease or a report must know of a gate.
type Brief struct {
	NodeID       string
	InstanceID   string // of the node
	Admitted     bool
	SessionEpoch int64
	LedgerID     string
}

// LockForWork reads gates under FOR SHARE in the order of their ids, so that a fence waits for who holds them and who comes after it sees it.
func LockForWork(ctx context.Context, tx pgx.Tx, nodeIDs []string) (map[string]Brief, error) {
	rows, err := tx.Query(ctx, `
		SELECT node_id::text, coalesce(node_instance_id::text, ''), admitted, session_epoch, coalesce(ledger_id::text, '')
		FROM lifecycle.node_gate WHERE node_id = ANY($1::uuid[]) ORDER BY node_id FOR SHARE`, nodeIDs)
	if err != nil {
		return nil, fmt.Errorf("lock gates: %w", err)
	}
	defer rows.Close()
	out := make(map[string]Brief, len(nodeIDs))
	for rows.Next() {
		var b Brief
		if err := rows.Scan(&b.NodeID, &b.InstanceID, &b.Admitted, &b.SessionEpoch, &b.LedgerID); err != nil {
			return nil, fmt.Errorf("read gate: %w", err)
		}
		out[b.NodeID] = b
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("lock gates: %w", err)
	}
	return out, nil
}

// MayLease refuses a lease to any session but the one that the gate was raised to.
func (b Brief) MayLease(generation int64) error {
	if b.NodeID == "" || !b.Admitted || b.SessionEpoch != generation {
		return fault.New(commonv1.Reason_REASON_NODE_NOT_ADMITTED, "the gate of this node is not open to this session")
	}
	return nil
}
