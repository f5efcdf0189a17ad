package gate

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
)

const (
	kindVerdict = "verdict.changed"
	// ofRuntime is the name by which a node is cordoned whose host is not as it was accepted.
	ofRuntime = verdictPrefix + "host_runtime_drift"

	verdictPrefix = "verdict:"
)

// VerdictConsumer is the configuration of the consumer that OnVerdict is for.
func VerdictConsumer() events.ConsumerConfig {
	return events.ConsumerConfig{Name: "verdicts", Schema: pg.RoleLifecycle, Kinds: []string{kindVerdict}}
}

var (
	knownVerdict = pg.Define(pg.RoleLifecycle, "gate.known_verdict", `
		SELECT EXISTS (SELECT FROM lifecycle.verdict_cordon v WHERE v.node_id = $1)`)
	noteVerdict = pg.Define(pg.RoleLifecycle, "gate.note_verdict", `
		INSERT INTO lifecycle.verdict_cordon AS v (node_id, version, reason, since) VALUES ($1, $2, $3, mesh.clock())
		ON CONFLICT (node_id) DO UPDATE SET version = EXCLUDED.version, reason = EXCLUDED.reason,
			since = CASE WHEN v.reason = '' THEN EXCLUDED.since ELSE v.since END
			WHERE v.version < EXCLUDED.version
		RETURNING v.node_id::text`)
)

// OnVerdict cordons a node whose host is not as it was accepted, as recovery has judged, and ends that cordon when the
// verdict on it ends. A cordon by anyone else stays. Of each node the newest verdict counts, in whichever order they
// are read.
func OnVerdict(ctx context.Context, tx pgx.Tx, r events.Record) error {
	if r.Kind != kindVerdict || r.Source != pg.RoleRecovery {
		return nil
	}
	verdict := &recoveryv1.NodeVerdict{}
	if err := r.Decode(verdict); err != nil {
		return err
	}
	node := verdict.GetNodeId()
	if !ids.Valid(node) { // it is about the control plane
		return nil
	}
	reason := runtimeDrift(verdict)
	if reason == "" && verdict.GetEnded().GetReason() != commonv1.DriftReason_DRIFT_REASON_HOST_RUNTIME_DRIFT {
		known, err := pg.Value[bool](ctx, tx, knownVerdict, node)
		if err != nil {
			return fmt.Errorf("look for cordon of a verdict: %w", err)
		}
		if !known {
			return nil
		}
	}
	// The gate is locked first, as by everyone who changes a cordon.
	g, err := one(ctx, tx, lockGate, node)
	if errors.Is(err, pgx.ErrNoRows) || err == nil && g.Retired {
		return nil
	}
	if err != nil {
		return fmt.Errorf("lock gate: %w", err)
	}
	noted, err := pg.All[notedVerdict](ctx, tx, noteVerdict, node, r.AggregateVersion, reason)
	if err != nil || len(noted) == 0 { // a newer one is applied already
		return err
	}
	if reason == "" {
		return EndCordonOf(ctx, tx, node, ofRuntime)
	}
	_, err = CordonUnlessIs(ctx, tx, node, reason, ofRuntime)
	return err
}

// notedVerdict is a node whose verdict was noted.
type notedVerdict struct {
	NodeID string `db:"node_id"`
}

// runtimeDrift returns why a verdict wants its node cordoned; empty: it does not. A verdict with a worse reason has the
// evidence of the drift beside its own.
func runtimeDrift(verdict *recoveryv1.NodeVerdict) string {
	const drift = commonv1.DriftReason_DRIFT_REASON_HOST_RUNTIME_DRIFT
	for _, e := range verdict.GetEvidence() {
		if e.GetReason() == drift {
			return strings.TrimSuffix("the host is not as it was accepted: "+e.GetDetail(), ": ")
		}
	}
	if verdict.GetReason() == drift {
		return "the host is not as it was accepted"
	}
	return ""
}
