package enrol

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/actions"
)

var readIssuer = pg.Define(pg.RoleRecovery, "enrol.read_issuer_of_token",
	`SELECT t.issued_by FROM recovery.token t WHERE t.token_id = $1`)

// actionOf returns the recovery action that an enrolment is the effect of; false: of none, as of a machine or instance
// that enrols for the first time. known: the node was enrolled before.
func actionOf(way Kind, known bool) (actions.Kind, bool) {
	switch way {
	case KindRecovery:
		return actions.ReEnrolment, true
	case KindBundle:
		return actions.Bundle, known
	case KindBootstrap:
		return actions.Rebootstrap, known
	case KindLaunch:
	}
	return 0, false
}

// noteEnrolled notes the effect of a recovery action, and returns a context with its correlation id. instance is the
// node instance that the node had before.
func noteEnrolled(ctx context.Context, tx pgx.Tx, a *redemption, instance, serial string) (context.Context, error) {
	kind, ok := actionOf(a.token.Kind, instance != "")
	if !ok {
		return ctx, nil
	}
	from := actions.Beginning{
		NodeID: a.token.NodeID, Kind: kind, Requester: actions.Automatic, AgentCorrelationID: obs.From(ctx).CorrelationID,
	}
	if a.token.Kind != KindRecovery {
		by, err := pg.Value[string](ctx, tx, readIssuer, a.token.ID)
		if err != nil {
			return ctx, fmt.Errorf("read issuer of token: %w", err)
		}
		from.Requester = by
	}
	correlation, err := actions.Enrolled(ctx, tx, from, "certificate "+serial+" was issued")
	if err != nil || correlation == "" {
		return ctx, err
	}
	return obs.With(ctx, obs.Correlation{CorrelationID: correlation}), nil
}

// noteRefused notes a refused attempt on the recovery action that is open, and returns its correlation id; empty if
// there is none.
func noteRefused(ctx context.Context, tx pgx.Tx, a attempt) (string, error) {
	kind, ok := actionOf(a.way, true)
	if !ok {
		return "", nil
	}
	return actions.Attempt(ctx, tx, a.nodeID, kind, "refused: "+names.Of(a.outcome), false)
}
