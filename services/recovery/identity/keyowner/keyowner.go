// Package keyowner decides whose a public key is: of the node that it was certified for first, for ever.
//
// It reads the rows of certificates, of retired nodes too, and writes none.
package keyowner

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
)

var (
	takeKeyLock = pg.Define(pg.RoleRecovery, "identity.take_key_lock", `
		SELECT pg_advisory_xact_lock(hashtextextended('recovery.key/' || encode($1::bytea, 'hex'), 0))`)

	readOtherHolder = pg.Define(pg.RoleRecovery, "identity.read_other_node_of_key", `
		SELECT node_id::text FROM recovery.serial WHERE csr_key_sha256 = $2 AND node_id <> $1 ORDER BY issued_at LIMIT 1`)
)

// Refuse refuses, as fault key_reuse, a key that was ever certified for another node, retired ones included:
// the caller is that node, or has a copy of its disk. Of concurrent transactions that certify one key for several
// nodes, the first to commit wins: each holds a lock on the key until it ends.
func Refuse(ctx context.Context, tx pgx.Tx, nodeID string, keySHA256 []byte) error {
	if _, err := pg.Exec(ctx, tx, takeKeyLock, keySHA256); err != nil {
		return fmt.Errorf("lock key: %w", err)
	}
	other, err := pg.Value[string](ctx, tx, readOtherHolder, nodeID, keySHA256)
	switch {
	case pg.IsNoRows(err):
		return nil
	case err != nil:
		return fmt.Errorf("read nodes of key: %w", err)
	}
	return fault.New(commonv1.Reason_REASON_KEY_REUSE, "", fault.Cause(&OtherNodeError{NodeID: other}))
}

// OtherNodeError names the node that a refused key certifies. It is for logs and the audit log alone, since the caller
// has proved only that it has the key.
type OtherNodeError struct{ NodeID string }

// Error returns a message that names the node.
func (e *OtherNodeError) Error() string { return "the key was certified for node " + e.NodeID }
