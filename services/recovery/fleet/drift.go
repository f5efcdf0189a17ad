package fleet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
)

const (
	kindDrift = commonv1.IncidentKind_INCIDENT_KIND_FLEET_DRIFT
	// driftWindow is within how long equal verdicts must begin to be one incident, as the failures that engage the brake.
	driftWindow = 5 * time.Minute
	// mostSampled bounds the nodes that an incident of equal verdicts names.
	mostSampled = 20
	// closedBySelf is who closes an incident of equal verdicts.
	closedBySelf = "recovery"
	// driftLock is the lock under which transactions count equal verdicts one after another.
	driftLock = 0x67707561_0391
)

// Drift is a reason that nodes have, of which recovery decides whether it is one incident.
type Drift struct {
	Reason     commonv1.DriftReason
	Severity   commonv1.Severity // of a verdict with it
	NextAction string            // of such a verdict
	Opens      bool              // false: an incident that is open may go on or end, and none is opened
	Suspicion  bool              // it is about the identity of a node: one node with it is an incident for security
}

// equals counts the nodes whose verdict has a reason.
type equals struct {
	Lately int32 `db:"lately"` // it began within the window
	Still  int32 `db:"still"`
}

var (
	takeDriftLock = pg.Define(pg.RoleRecovery, "fleet.take_drift_lock", `SELECT pg_advisory_xact_lock($1)`)

	countEquals = pg.Define(pg.RoleRecovery, "fleet.count_equal_verdicts", `
		SELECT count(*) FILTER (WHERE v.since > mesh.clock() - make_interval(secs => $2))::int AS lately,
			count(*)::int AS still
		FROM recovery.verdict v
		WHERE v.reason = $1 AND v.reason <> 'unspecified' AND v.node_id <> '00000000-0000-0000-0000-000000000000'`)

	sampleEquals = pg.Define(pg.RoleRecovery, "fleet.sample_equal_verdicts", `
		SELECT v.node_id::text FROM recovery.verdict v
		WHERE v.reason = $1 AND v.reason <> 'unspecified' AND v.node_id <> '00000000-0000-0000-0000-000000000000'
		ORDER BY v.since DESC NULLS LAST, v.node_id LIMIT $2`)

	// countExpected counts the nodes that are expected to be there, up to the number at which a share of them is above $1.
	countExpected = pg.Define(pg.RoleRecovery, "fleet.count_expected_nodes", `
		SELECT count(*)::int FROM (SELECT FROM recovery.identity i WHERE i.state IN ('active', 'held')
			LIMIT ceil(($1::int + 1) / $2::float8)::bigint) f`)

	// reopenDrift opens the incident again that ended last, if that is not longer ago than the window.
	reopenDrift = pg.Define(pg.RoleRecovery, "fleet.reopen_drift", `
		UPDATE recovery.incident i SET closed_at = NULL, closed_by = '', close_reason = '', summary = $3, node_ids = $4,
			count = $5, error_code = i.key, last_seen_at = mesh.clock(), version = i.version + 1
		WHERE i.incident_id = (
			SELECT c.incident_id FROM recovery.incident c
			WHERE c.kind = 'fleet_drift' AND c.key = $1 AND c.closed_by = '`+closedBySelf+`'
				AND c.closed_at > mesh.clock() - make_interval(secs => $2)
			ORDER BY c.closed_at DESC LIMIT 1)
		RETURNING `+pg.Columns[incidentRow]("i"))

	openDrifts = pg.Define(pg.RoleRecovery, "fleet.open_drifts",
		`SELECT DISTINCT i.key FROM recovery.incident i
		WHERE i.kind IN ('fleet_drift', 'identity_suspected') AND i.closed_at IS NULL ORDER BY i.key`)
)

// OpenDrifts returns the reasons that have an open incident.
func OpenDrifts(ctx context.Context, tx pgx.Tx) ([]commonv1.DriftReason, error) {
	keys, err := pg.Values[string](ctx, tx, openDrifts)
	if err != nil {
		return nil, fmt.Errorf("read incidents of equal verdicts: %w", err)
	}
	var out []commonv1.DriftReason
	for _, key := range keys {
		// A newer build goes on with a reason that this one does not know.
		if reason := aside.Value[commonv1.DriftReason]("watchdog.incident", key, key); reason != 0 {
			out = append(out, reason)
		}
	}
	return out, nil
}

// EvaluateDrift makes one incident of the equal verdicts of many nodes: more than the share of the fleet that may fail
// at once, and more than two, began to have the reason within driftWindow. The incident ends when fewer than half as
// many have it, and goes on as the same one if as many have it again within driftWindow. A suspicion about one
// identity is an incident of its own kind. EvaluateDrift must be called in the transaction that writes verdicts,
// behind them: the transactions of several replicas count one after another. What it reads grows with the nodes that
// have the reason, and not with the fleet.
func EvaluateDrift(ctx context.Context, tx pgx.Tx, logger *slog.Logger, now time.Time, fraction float64,
	list ...Drift,
) error {
	if len(list) == 0 {
		return nil
	}
	if _, err := pg.Exec(ctx, tx, takeDriftLock, int64(driftLock)); err != nil {
		return fmt.Errorf("take lock of equal verdicts: %w", err)
	}
	for _, d := range list {
		if err := evaluateDrift(ctx, tx, logger, now, fraction, d); err != nil {
			return err
		}
		if d.Suspicion {
			if err := evaluateSuspicion(ctx, tx, logger, now, d); err != nil {
				return err
			}
		}
	}
	return nil
}

func evaluateDrift(ctx context.Context, tx pgx.Tx, logger *slog.Logger, now time.Time, fraction float64,
	d Drift,
) error {
	reason := names.Of(d.Reason)
	was, err := openIncident(ctx, tx, true, kindDrift, reason)
	if err != nil || was == nil && !d.Opens {
		return err
	}
	// The statements after the lock see what its last holder committed.
	n, err := pg.One[equals](ctx, tx, countEquals, reason, driftWindow.Seconds())
	if err != nil {
		return fmt.Errorf("count equal verdicts: %w", err)
	}
	if was != nil {
		most, err := mostExpected(ctx, tx, 2*n.Still, fraction)
		switch {
		case err != nil:
			return err
		case 2*n.Still < most:
			return closeIncidents(ctx, tx, kindDrift, []string{reason}, closedBySelf, "", now)
		}
		return driftGoesOn(ctx, tx, was, n, now)
	}
	most, err := mostExpected(ctx, tx, n.Lately, fraction)
	if err != nil || n.Lately <= most {
		return err
	}
	nodes, err := pg.Values[string](ctx, tx, sampleEquals, reason, mostSampled)
	if err != nil {
		return fmt.Errorf("read nodes with equal verdicts: %w", err)
	}
	i := &Incident{
		Kind: kindDrift, Key: reason, ErrorCode: reason, Severity: paged(d.Severity),
		Summary: driftSummary(reason, n.Still), Nodes: nodes,
		OwnerLayer: commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW, Count: int64(n.Still),
		NextAction: "find what these nodes share before any one of them: `gpuaas status`, `gpuaas ca status`, the " +
			"endpoint, the network; of one of them: " + d.NextAction,
	}
	slices.Sort(i.Nodes)
	again, err := readIncident(ctx, tx, reopenDrift, reason, driftWindow.Seconds(), i.Summary, i.Nodes, i.Count)
	switch {
	case err == nil:
		logger.WarnContext(ctx, "many nodes have the same reason again", slog.String("reason", reason),
			slog.Int("nodes", int(n.Lately)), slog.String("incident_id", again.ID))
		return report(ctx, tx, again)
	case !errors.Is(err, pgx.ErrNoRows):
		return fmt.Errorf("open incident of %s again: %w", reason, err)
	}
	logger.ErrorContext(ctx, "many nodes have the same reason at once", slog.String("reason", reason),
		slog.Int("nodes", int(n.Lately)), slog.Int("limit", int(most)))
	return (&Round{tx: tx, now: now, locked: true}).Raise(ctx, i)
}

// mostExpected returns the number of nodes above which a reason is one incident. It is exact if n is above it, and else
// at least n.
func mostExpected(ctx context.Context, tx pgx.Tx, n int32, fraction float64) (int32, error) {
	if n <= leastAffected {
		return leastAffected, nil
	}
	expected, err := pg.Value[int32](ctx, tx, countExpected, n, fraction)
	if err != nil {
		return 0, fmt.Errorf("count nodes: %w", err)
	}
	return mostAffected(expected, fraction), nil
}

// driftGoesOn updates an incident whose number of nodes has changed: at once if it has doubled, else after
// incidentEvery.
func driftGoesOn(ctx context.Context, tx pgx.Tx, was *Incident, n equals, now time.Time) error {
	count := int64(n.Still)
	if count == was.Count || count < 2*was.Count && now.Sub(was.LastSeenAt) < incidentEvery {
		return nil
	}
	nodes, err := pg.Values[string](ctx, tx, sampleEquals, was.Key, mostSampled)
	if err != nil {
		return fmt.Errorf("read nodes with equal verdicts: %w", err)
	}
	slices.Sort(nodes)
	was.Nodes, was.Count, was.Summary, was.LastSeenAt = nodes, count, driftSummary(was.Key, n.Still), now
	was.Version++
	return update(ctx, tx, []*Incident{was})
}

func driftSummary(reason string, nodes int32) string {
	return fmt.Sprintf("%d nodes have the reason %s, which began on many of them within %s: one cause of ours is more "+
		"likely than one of each", nodes, reason, driftWindow)
}

// paged returns the severity of an incident of verdicts of a severity: P1 at least.
func paged(s commonv1.Severity) commonv1.Severity {
	if s == commonv1.Severity_SEVERITY_P0 {
		return s
	}
	return commonv1.Severity_SEVERITY_P1
}
