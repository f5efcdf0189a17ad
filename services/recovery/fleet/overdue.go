package fleet

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
)

const (
	kindOverdue = commonv1.IncidentKind_INCIDENT_KIND_STATE_OVERDUE
	// OverdueEvery is how often identities are looked for whose state has lasted for longer than its budget.
	OverdueEvery = time.Minute
	// overdueLock is the lock under which replicas do so one after another.
	overdueLock = 0x67707561_0420
)

// overdue is an identity whose state has lasted for too long, and how many such there are.
type overdue struct {
	NodeID string `db:"node_id"`
	All    int32  `db:"all"`
}

// readOverdue leaves out the nodes of incidents that a person has closed. Such an incident is of all nodes that were
// overdue when it was last written: those that it names, and where they were more, those that were overdue by then. A
// node that has left the state since counts anew.
var readOverdue = pg.Define(pg.RoleRecovery, "fleet.read_overdue", `
	WITH named AS MATERIALIZED (
		SELECT c.node_ids, c.count, c.last_seen_at FROM recovery.incident c
		WHERE c.kind = 'state_overdue' AND c.key = $1 AND c.closed_at IS NOT NULL AND c.closed_by <> '`+closedBySelf+`'
	)
	SELECT i.node_id::text, count(*) OVER ()::int AS "all"
	FROM recovery.identity i
	WHERE i.state = $1 AND i.state IN ('pending', 'held', 'quarantined', 'fenced')
		AND i.state_at < mesh.clock() - make_interval(secs => $2)
		AND NOT EXISTS (SELECT FROM named c WHERE i.state_at <= c.last_seen_at AND (i.node_id::text = ANY (c.node_ids)
			OR c.count > cardinality(c.node_ids) AND i.state_at + make_interval(secs => $2) <= c.last_seen_at))
	ORDER BY i.state_at DESC, i.node_id LIMIT $3`)

// EvaluateOverdue keeps one incident open for each state of an identity that some node has had for longer than the
// state's budget (policy.States), except active, whose silence is a verdict. It names at most mostSampled nodes, and
// ends when no node is overdue. Nodes of an incident that a person has closed are neither named nor counted again until
// they have left the state. What it reads grows with the nodes that are overdue, and with the incidents that are kept.
func EvaluateOverdue(ctx context.Context, pool *pgxpool.Pool, logger *slog.Logger, set policy.Set) error {
	return pg.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := pg.Exec(ctx, tx, takeDriftLock, int64(overdueLock)); err != nil {
			return fmt.Errorf("take lock of overdue states: %w", err)
		}
		for _, row := range policy.States() {
			if row.Enum != commonv1.NodeIdentityState(0).Descriptor().FullName() || row.Terminal ||
				row.State == names.Of(commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE) {
				continue
			}
			if err := evaluateOverdue(ctx, tx, logger, row, row.BudgetWithin(set)); err != nil {
				return err
			}
		}
		return nil
	})
}

// retire is the verb by which a person gives up a node.
const retire = "nodes retire"

func evaluateOverdue(ctx context.Context, tx pgx.Tx, logger *slog.Logger, row policy.StateRow,
	budget time.Duration,
) error {
	was, err := openIncident(ctx, tx, true, kindOverdue, row.State)
	if err != nil {
		return err
	}
	found, err := pg.All[overdue](ctx, tx, readOverdue, row.State, budget.Seconds(), mostSampled)
	if err != nil {
		return fmt.Errorf("read identities that are %s for long: %w", row.State, err)
	}
	if len(found) == 0 && was == nil {
		return nil
	}
	now, err := pg.Value[time.Time](ctx, tx, readClock)
	if err != nil {
		return fmt.Errorf("read the clock: %w", err)
	}
	if len(found) == 0 {
		return closeIncidents(ctx, tx, kindOverdue, []string{row.State}, closedBySelf, "", now)
	}
	suspects := make([]suspect, len(found))
	for i, o := range found {
		suspects[i] = suspect{NodeID: o.NodeID, All: o.All}
	}
	nodes, count := nodesOf(suspects)
	summary := fmt.Sprintf("%d nodes are %s for longer than %s", count, row.State, budget)
	if was != nil {
		if was.names(nodes, count) && was.Summary == summary { // the budget may have changed
			return nil
		}
		was.Nodes, was.Count, was.Summary, was.LastSeenAt = nodes, count, summary, now
		was.Version++
		return update(ctx, tx, []*Incident{was})
	}
	logger.WarnContext(ctx, "nodes are in a state for longer than its budget", slog.String("state", row.State),
		slog.Int64("nodes", count))
	next := "`gpuaas nodes retire NODE --reason TEXT` if it does not come back"
	if row.Verb != retire {
		next = fmt.Sprintf("`gpuaas %s NODE --reason TEXT`, or ", row.Verb) + next
	}
	return (&Round{tx: tx, now: now, locked: true}).Raise(ctx, &Incident{
		Kind: kindOverdue, Key: row.State, Nodes: nodes, Count: count, Summary: summary,
		OwnerLayer: commonv1.OwnerLayer_OWNER_LAYER_AUTH,
		NextAction: "for each node: find out what it waits for with `gpuaas nodes get NODE`; then " + next,
	})
}
