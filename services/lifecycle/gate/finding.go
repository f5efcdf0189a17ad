package gate

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
)

// CordonUnlessIs cordons a node that is not cordoned yet and reports it. It answers who cordons the node afterwards, empty if there is no such node.
func CordonUnlessIs(ctx context.Context, tx pgx.Tx, nodeID, reason, by string) (string, error) {
	g, err := scan(tx.QueryRow(ctx, `SELECT `+columns+` FROM lifecycle.node_gate WHERE node_id = $1 AND NOT retired FOR NO KEY UPDATE`, nodeID))
	if errors.Is(err, pgx.ErrNoRows) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("read gate: %w", err)
	}
	if g.Cordoned {
		return g.CordonedBy, nil
	}
	return by, CordonFor(ctx, tx, nodeID, reason, by)
}

// EndCordonOf takes a node's cordon away if it is by's own, or passes it to another who wants it. Anybody else's stays. It reports what it changed.
func EndCordonOf(ctx context.Context, tx pgx.Tx, nodeID, by, nextReason, nextBy string) error {
	g, err := scan(tx.QueryRow(ctx, `
		UPDATE lifecycle.node_gate SET cordoned = $4 <> '', cordon_reason = $3, cordoned_by = $4, version = version + 1
		WHERE node_id = $1 AND cordoned AND cordoned_by = $2 RETURNING `+columns, nodeID, by, nextReason, nextBy))
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("end cordon: %w", err)
	}
	if _, err := events.Append(ctx, tx, g.event()); err != nil {
		return fmt.Errorf("report gate: %w", err)
	}
	_, err = audit.Record(ctx, tx, cordoned(g, nextReason, by))
	return err //nolint:wrapcheck // it says what it did
}
