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

// evaluateSuspicion keeps one incident for security open for a reason while any node has it. None is opened beside the
// incident of many nodes with the reason, whose cause is rather ours, nor again for nodes that had the reason when a
// person closed it.
func evaluateSuspicion(ctx context.Context, tx pgx.Tx, logger *slog.Logger, now time.Time, d Drift) error {
	reason := names.Of(d.Reason)
	was, err := openIncident(ctx, tx, kindSuspected, reason)
	if err != nil {
		return err
	}
	n, err := pg.One[equals](ctx, tx, countEquals, reason, driftWindow.Seconds())
	if err != nil {
		return fmt.Errorf("count suspected identities: %w", err)
	}
	summary := fmt.Sprintf("%d nodes have the reason %s: others may hold their keys, and know what is on the machines",
		n.Still, reason)
	switch {
	case was != nil && n.Still == 0:
		return closeIncident(ctx, tx, kindSuspected, reason, byJudge, now)
	case was != nil:
		return driftGoesOn(ctx, tx, was, n, now, summary)
	case n.Lately == 0:
		return nil
	}
	if many, err := openIncident(ctx, tx, kindDrift, reason); err != nil || many != nil {
		return err
	}
	nodes, err := pg.Values[string](ctx, tx, sampleEquals, reason, mostSampled)
	if err != nil {
		return fmt.Errorf("read suspected identities: %w", err)
	}
	slices.Sort(nodes)
	logger.ErrorContext(ctx, "an identity is suspected", slog.String("reason", reason), slog.Int("nodes", int(n.Still)))
	return (&Round{tx: tx, now: now, locked: true}).Raise(ctx, &Incident{
		Kind: kindSuspected, Key: reason, ErrorCode: reason, Severity: d.Severity, Summary: summary, Nodes: nodes,
		OwnerLayer: commonv1.OwnerLayer_OWNER_LAYER_AUTH, Count: int64(n.Still), NextAction: d.NextAction,
	})
}
