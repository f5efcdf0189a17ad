package gate

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
)

// Brief is what a lease or a report must know of a gate.
type Brief struct {
	NodeID       string `db:"node_id" expr:"@.node_id::text"`
	InstanceID   string `db:"node_instance_id" expr:"coalesce(@.node_instance_id::text, '')"` // of the node
	Admitted     bool   `db:"admitted"`
	SessionEpoch int64  `db:"session_epoch"`
	LedgerID     string `db:"ledger_id" expr:"coalesce(@.ledger_id::text, '')"`
}

// LockForWork reads gates under FOR SHARE in the order of their ids, so that a fence waits for who holds them and who comes after it sees it.
func LockForWork(ctx context.Context, tx pgx.Tx, nodeIDs []string) (map[string]Brief, error) {
	list, err := pg.All[Brief](ctx, tx, lockGatesForWork, nodeIDs)
	if err != nil {
		return nil, fmt.Errorf("lock gates: %w", err)
	}
	out := make(map[string]Brief, len(list))
	for _, b := range list {
		out[b.NodeID] = b
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
