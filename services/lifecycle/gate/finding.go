package gate

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
)

// CordonUnlessIs cordons a node that is not cordoned yet and reports it. It answers who cordons the node afterwards, empty if there is no such node.
func CordonUnlessIs(ctx context.Context, tx pgx.Tx, nodeID, reason, by string) (string, error) {
	g, err := one(ctx, tx, lockGate, nodeID)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return "", fmt.Errorf("read gate: %w", err)
	}
	if err != nil || g.Retired {
		return "", nil //nolint:nilerr // there is no such node
	}
	if g.Cordoned {
		return g.CordonedBy, nil
	}
	return by, CordonFor(ctx, tx, nodeID, reason, by)
}

// Release is who cordons a node on which a release has left something.
const Release = "release"

// heir returns who else wants a node cordoned, and why; empty if nobody does. The oldest request comes first.
func heir(ctx context.Context, tx pgx.Tx, nodeID, except string) (string, string, error) {
	request, err := pg.One[cordonRequest](ctx, tx, nextCordon, nodeID, except, Release)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return "", "", fmt.Errorf("look for who else cordons the node: %w", err)
	}
	return request.By, request.Reason, nil
}

// EndCordonOf takes a node's cordon away if it is by's own, or passes it to another who wants it: an open finding, or what a release left there. Anybody
// else's stays. It reports what it changed.
func EndCordonOf(ctx context.Context, tx pgx.Tx, nodeID, by string) error {
	next, reason, err := heir(ctx, tx, nodeID, by)
	if err != nil {
		return err
	}
	g, err := one(ctx, tx, passCordon, nodeID, by, reason, next)
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
	return err
}

// own says whether a cordon is by a part of the mesh rather than by a person.
func own(by string) bool { return by == Release || strings.HasPrefix(by, "finding:") }
