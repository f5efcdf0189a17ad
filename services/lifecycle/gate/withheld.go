package gate

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
)

// leastCordoned is the number of nodes that verdicts may cordon in any fleet, however small.
const leastCordoned = 2

// releaseBatch is how many cordons that waited are set in one transaction.
const releaseBatch = 100

// ReleaseEvery is how often a replica looks for cordons that wait without cause.
const ReleaseEvery = 30 * time.Second

// Cordons cordons nodes as the verdicts on them want it.
type Cordons struct {
	Logger *slog.Logger
	Policy policy.Reader
	// Waiting is the gauge of NewWaiting, which Measure sets.
	Waiting prometheus.Gauge
}

// waiting is a node whose cordon waits.
type waiting struct {
	NodeID string `db:"node_id"`
	Reason string `db:"reason"`

	correlation string // of the verdict; empty for a cordon that waited
}

var (
	countWanted = pg.Define(pg.RoleLifecycle, "gate.count_wanted_cordons", `
		SELECT count(*)::int FROM lifecycle.verdict_cordon v JOIN lifecycle.node_gate g ON g.node_id = v.node_id
		WHERE v.reason <> '' AND NOT g.retired`)
	// countGates counts nodes up to the number at which a share of them is above $1.
	countGates = pg.Define(pg.RoleLifecycle, "gate.count_nodes", `
		SELECT count(*)::int FROM (SELECT FROM lifecycle.node_gate g WHERE NOT g.retired
			LIMIT ceil(($1::int + 1) / $2::float8)::bigint) f`)
	// withholdCordons leaves a cordon that stands: it passes on as one that was set.
	withholdCordons = pg.Define(pg.RoleLifecycle, "gate.withhold_cordons", `
		UPDATE lifecycle.verdict_cordon v SET withheld = true FROM lifecycle.node_gate g
		WHERE v.node_id = ANY($1::uuid[]) AND v.reason <> '' AND g.node_id = v.node_id
			AND NOT (g.cordoned AND g.cordoned_by = '`+ofRuntime+`')`)
	anyWithheld = pg.Define(pg.RoleLifecycle, "gate.any_withheld_cordon", `
		SELECT EXISTS (SELECT FROM lifecycle.verdict_cordon v WHERE v.withheld)`)
	// takeWithheld waits for no gate that another transaction has locked: gates are locked by their ids.
	takeWithheld = pg.Define(pg.RoleLifecycle, "gate.take_withheld_cordons", `
		WITH due AS (
			SELECT v.node_id FROM lifecycle.verdict_cordon v JOIN lifecycle.node_gate g ON g.node_id = v.node_id
			WHERE v.withheld ORDER BY v.since, v.node_id LIMIT $1 FOR UPDATE SKIP LOCKED
		)
		UPDATE lifecycle.verdict_cordon v SET withheld = false FROM due d WHERE v.node_id = d.node_id
		RETURNING v.node_id::text AS node_id, v.reason`)
)

// setCordons sets the cordons that verdicts newly want, unless verdicts want to cordon more nodes than may fail at
// once: then the cause is likely the mesh itself, and a cordon of them all would leave no place for workspaces. Those
// cordons wait until fewer are wanted. Cordons that were set before stay. It returns how many of those that waited are
// set, at most releaseBatch.
func (c Cordons) setCordons(ctx context.Context, tx pgx.Tx, wanted []waiting) (int, error) {
	if len(wanted) == 0 {
		if waits, err := pg.Value[bool](ctx, tx, anyWithheld); err != nil || !waits {
			return 0, err
		}
	}
	over, count, err := c.tooMany(ctx, tx)
	if err != nil {
		return 0, err
	}
	if over {
		if len(wanted) == 0 {
			return 0, nil
		}
		nodes := make([]string, len(wanted))
		for i, w := range wanted {
			nodes[i] = w.NodeID
		}
		c.Logger.WarnContext(ctx, "verdicts want to cordon too many nodes at once: these cordons wait",
			slog.Int("wanted", int(count)), slog.Int("nodes", len(nodes)))
		if _, err := pg.Exec(ctx, tx, withholdCordons, nodes); err != nil {
			return 0, fmt.Errorf("withhold cordons: %w", err)
		}
		return 0, reportWaiting(ctx, tx, showWaiting, nodes)
	}
	released, err := pg.All[waiting](ctx, tx, takeWithheld, releaseBatch)
	if err != nil {
		return 0, fmt.Errorf("read withheld cordons: %w", err)
	}
	wanted = append(wanted, released...)
	nodes := make([]string, len(wanted))
	for i, w := range wanted {
		nodes[i] = w.NodeID
	}
	if err := reportWaiting(ctx, tx, hideWaiting, nodes); err != nil {
		return 0, err
	}
	for _, w := range wanted {
		ctx := obs.With(ctx, obs.Correlation{CorrelationID: w.correlation})
		if _, err := CordonUnlessIs(ctx, tx, w.NodeID, w.Reason, ofRuntime); err != nil {
			return 0, err
		}
	}
	return len(released), nil
}

// Release sets the cordons that wait, once they are not too many any more, and returns how many. Verdicts do so as they
// are applied; Release does so after the fleet has grown or the policy lets more nodes fail, which brings no verdict.
func (c Cordons) Release(ctx context.Context, db pg.Beginner) (int, error) {
	total := 0
	for {
		released := 0
		err := pg.InTx(ctx, db, func(ctx context.Context, tx pgx.Tx) error {
			var err error
			released, err = c.setCordons(ctx, tx, nil)
			return err
		})
		if err != nil {
			return total, fmt.Errorf("set cordons that waited: %w", err)
		}
		if total += released; released < releaseBatch {
			return total, nil
		}
	}
}

// tooMany reports whether verdicts want to cordon more nodes than the share of the fleet that may fail at once, and how
// many they want to cordon.
func (c Cordons) tooMany(ctx context.Context, tx pgx.Tx) (bool, int32, error) {
	count, err := pg.Value[int32](ctx, tx, countWanted)
	if err != nil {
		return false, 0, fmt.Errorf("count wanted cordons: %w", err)
	}
	if count <= leastCordoned {
		return false, count, nil
	}
	fraction := c.Policy.Current().BrakeFleetFraction()
	fleet, err := pg.Value[int32](ctx, tx, countGates, count, fraction)
	if err != nil {
		return false, 0, fmt.Errorf("count nodes: %w", err)
	}
	return count > max(int32(fraction*float64(fleet)+1e-9), leastCordoned), count, nil
}
