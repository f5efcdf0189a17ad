package fleet

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
)

const kindSuspected = commonv1.IncidentKind_INCIDENT_KIND_IDENTITY_SUSPECTED

// suspect is a node that is on hold for its verdict's reason.
type suspect struct {
	NodeID string     `db:"node_id"`
	Since  *time.Time `db:"since"`
	All    int32      `db:"all"` // such nodes
}

// ended is the incident of a reason that ended last.
type ended struct {
	ID string    `db:"incident_id"`
	At time.Time `db:"closed_at"`
	By string    `db:"closed_by"`
	// LastSeen is when it was last written: it is of all nodes that had the reason by then.
	LastSeen time.Time `db:"last_seen_at"`
}

var (
	// A verdict alone is less than a suspicion: a request to enrol with an old join state may have been delayed, or come
	// from a host whose disk was put back, and no node is put on hold for it.
	readSuspects = pg.Define(pg.RoleRecovery, "fleet.read_suspects", `
		SELECT v.node_id::text, v.since, count(*) OVER ()::int AS "all"
		FROM recovery.verdict v JOIN recovery.identity i USING (node_id)
		WHERE v.reason = $1 AND v.reason <> 'unspecified' AND i.state = 'held' AND i.alarm = v.reason
		ORDER BY v.since DESC NULLS LAST, v.node_id LIMIT $2`)

	lastSuspected = pg.Define(pg.RoleRecovery, "fleet.last_suspected", `
		SELECT c.incident_id::text, c.closed_at, c.closed_by, c.last_seen_at FROM recovery.incident c
		WHERE c.kind = 'identity_suspected' AND c.key = $1 AND c.closed_at IS NOT NULL ORDER BY c.closed_at DESC LIMIT 1`)

	reopenSuspected = pg.Define(pg.RoleRecovery, "fleet.reopen_suspected", `
		UPDATE recovery.incident i SET closed_at = NULL, closed_by = '', close_reason = '' WHERE i.incident_id = $1`)
)

// evaluateSuspicion keeps one incident for security open for a reason while any node is on hold for it. None is opened
// beside the incident of many nodes with the reason, which one cause of the control plane explains better. For nodes
// that had the reason when a person closed it none is opened again; one that ended by itself within driftWindow goes on
// as the same.
func evaluateSuspicion(ctx context.Context, tx pgx.Tx, logger *slog.Logger, now time.Time, d Drift) error {
	reason := names.Of(d.Reason)
	was, err := openIncident(ctx, tx, true, kindSuspected, reason)
	if err != nil {
		return err
	}
	suspects, err := pg.All[suspect](ctx, tx, readSuspects, reason, mostSampled)
	switch {
	case err != nil:
		return fmt.Errorf("read suspected identities: %w", err)
	case len(suspects) == 0 && was == nil:
		return nil
	case len(suspects) == 0:
		return closeIncidents(ctx, tx, kindSuspected, []string{reason}, closedBySelf, "", now)
	case was != nil:
		return suspicionGoesOn(ctx, tx, was, suspects, now, false)
	}
	if many, err := openIncident(ctx, tx, true, kindDrift, reason); err != nil || many != nil {
		return err
	}
	last, err := pg.One[ended](ctx, tx, lastSuspected, reason)
	switch {
	case pg.IsNoRows(err):
	case err != nil:
		return fmt.Errorf("read the last suspicion: %w", err)
	case last.By == closedBySelf && now.Sub(last.At) < driftWindow:
		if _, err := pg.Exec(ctx, tx, reopenSuspected, last.ID); err != nil {
			return fmt.Errorf("reopen incident of %s: %w", reason, err)
		}
		if was, err = openIncident(ctx, tx, true, kindSuspected, reason); err != nil || was == nil {
			return err
		}
		return suspicionGoesOn(ctx, tx, was, suspects, now, true)
	case !slices.ContainsFunc(suspects, func(s suspect) bool { return s.Since != nil && s.Since.After(last.LastSeen) }):
		return nil
	}
	nodes, count := nodesOf(suspects)
	logger.ErrorContext(ctx, "an identity is suspected", slog.String("reason", reason), slog.Int64("nodes", count))
	return (&Round{tx: tx, now: now, locked: true}).Raise(ctx, &Incident{
		Kind: kindSuspected, Key: reason, ErrorCode: reason, Nodes: nodes, Count: count,
		Summary: suspicionSummary(reason, count), OwnerLayer: commonv1.OwnerLayer_OWNER_LAYER_AUTH, NextAction: d.NextAction,
	})
}

// suspicionGoesOn updates an incident if it names other nodes than the suspects, and anyway if it was opened again.
func suspicionGoesOn(ctx context.Context, tx pgx.Tx, was *Incident, suspects []suspect, now time.Time,
	again bool,
) error {
	nodes, count := nodesOf(suspects)
	if !again && was.names(nodes, count) {
		return nil
	}
	was.Nodes, was.Count, was.Summary, was.LastSeenAt = nodes, count, suspicionSummary(was.Key, count), now
	was.Version++
	return update(ctx, tx, []*Incident{was})
}

// nodesOf returns the ids of suspects in order, and how many there are, those that were not read included.
func nodesOf(suspects []suspect) ([]string, int64) {
	nodes := make([]string, len(suspects))
	for i, s := range suspects {
		nodes[i] = s.NodeID
	}
	slices.Sort(nodes)
	return nodes, int64(suspects[0].All)
}

func suspicionSummary(reason string, nodes int64) string {
	return fmt.Sprintf("%d nodes are on hold for %s: others may hold their keys, and know what is on the machines", nodes,
		reason)
}
