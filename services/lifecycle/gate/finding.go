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

// CordonUnlessIs cordons a node that is not cordoned yet and appends the event. It returns who cordons the node
// afterwards, or "" if there is no such node or it is retired.
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

// Release is the name by which a node is cordoned on which a release has left resources.
const Release = "release"

// heir returns who requested a cordon of the node, apart from except, and why; empty if there is no such request. It
// returns the oldest request.
func heir(ctx context.Context, tx pgx.Tx, nodeID, except string) (string, string, error) {
	request, err := pg.One[cordonRequest](ctx, tx, nextCordon, nodeID, except, Release)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return "", "", fmt.Errorf("look for who else cordons the node: %w", err)
	}
	return request.By, request.Reason, nil
}

// LockForCordons locks the gates of nodes whose cordons a transaction begins or ends one after the other, in the order
// of their ids.
func LockForCordons(ctx context.Context, tx pgx.Tx, nodeIDs ...string) error {
	if len(nodeIDs) < 2 { // the only one is locked as it is read
		return nil
	}
	_, err := lockUpdate(ctx, tx, nodeIDs)
	return err
}

// EndCordonOf ends a node's cordon if it is by's own, or passes it to the next request: an open finding, a verdict, or
// resources that a release left there. A cordon by another requester stays. It appends the event of a change and its
// audit entry, whose actor is by for a cordon that ended, and the next requester for one that passed, as its reason is
// the requester's.
func EndCordonOf(ctx context.Context, tx pgx.Tx, nodeID, by string) error {
	// The gate is locked before the requests are read: a release that leaves resources locks it as well, so that what it
	// leaves is among the requests, or the cordon that it finds is the passed one.
	if _, err := one(ctx, tx, lockGate, nodeID); err != nil {
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		return fmt.Errorf("lock gate: %w", err)
	}
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
	if _, err := events.Append(ctx, tx, g.eventOf(ctx)); err != nil {
		return fmt.Errorf("report gate: %w", err)
	}
	actor := by
	if g.Cordoned {
		actor = next
	}
	_, err = audit.Record(ctx, tx, cordoned(g, reason, actor))
	return err
}

// own reports whether a cordon is by a part of the mesh rather than by a person.
func own(by string) bool {
	return by == Release || strings.HasPrefix(by, "finding:") || strings.HasPrefix(by, verdictPrefix)
}
