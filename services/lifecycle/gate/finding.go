package gate

import (
	"context"
	"errors"
	"fmt"
	"strings"

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

// Release is who cordons a node on which a release has left something.
const Release = "release"

// heir answers who else wants a node cordoned, and why; empty if nobody does. The oldest wish comes first.
func heir(ctx context.Context, tx pgx.Tx, nodeID, except string) (string, string, error) {
	var by, reason string
	err := tx.QueryRow(ctx, `
		SELECT w.by, w.reason FROM (
			SELECT 'finding:' || f.finding_id AS by, f.summary AS reason, f.first_seen_at AS since
			FROM lifecycle.finding f WHERE f.node_id = $1 AND f.resolved_at IS NULL AND f.cordoned
			UNION ALL
			SELECT $3::text, 'what a release gave up is still here: ' || c.kind || ' ' || c.deterministic_name, c.orphaned_at
			FROM lifecycle.resource_claim c
			WHERE c.node_id = $1 AND c.orphaned_at IS NOT NULL AND c.released_at IS NULL AND c.kind IN ('slot', 'instance', 'storage', 'workload')
			UNION ALL
			SELECT $3::text, 'the release of allocation ' || a.allocation_id || ' has failed', a.state_at
			FROM lifecycle.allocation a WHERE a.node_id = $1 AND a.state = 'release_failed'
		) w WHERE w.by <> $2 ORDER BY w.since, w.by LIMIT 1`, nodeID, except, Release).Scan(&by, &reason)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return "", "", fmt.Errorf("look for who else cordons the node: %w", err)
	}
	return by, reason, nil
}

// EndCordonOf takes a node's cordon away if it is by's own, or passes it to another who wants it: an open finding, or what a release left there. Anybody
// else's stays. It reports what it changed.
func EndCordonOf(ctx context.Context, tx pgx.Tx, nodeID, by string) error {
	next, reason, err := heir(ctx, tx, nodeID, by)
	if err != nil {
		return err
	}
	g, err := scan(tx.QueryRow(ctx, `
		UPDATE lifecycle.node_gate SET cordoned = $4 <> '', cordon_reason = $3, cordoned_by = $4, version = version + 1
		WHERE node_id = $1 AND cordoned AND cordoned_by = $2 RETURNING `+columns, nodeID, by, reason, next))
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("end cordon: %w", err)
	}
	if _, err := events.Append(ctx, tx, g.event()); err != nil {
		return fmt.Errorf("report gate: %w", err)
	}
	_, err = audit.Record(ctx, tx, cordoned(g, reason, by))
	return err //nolint:wrapcheck // it says what it did
}

// own says whether a cordon is by a part of the mesh rather than by a person.
func own(by string) bool { return by == Release || strings.HasPrefix(by, "finding:") }
