package actions

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
)

// Begin begins an action in the caller's transaction, or joins the open one of the node and kind, and returns its
// correlation id. It is empty if the open one is of a newer build.
func Begin(ctx context.Context, tx pgx.Tx, from Beginning) (string, error) {
	b, err := Open(ctx, tx, from.NodeID)
	if err != nil {
		return "", err
	}
	a := b.Begin(from)
	if a == nil {
		return "", nil
	}
	return a.CorrelationID, b.Save(ctx, tx)
}

// Attempt notes an attempt of the open action of a node and a kind and what came of it, in words, and returns its
// correlation id; effect: it had the effect of the action. It does nothing if no such action is open.
func Attempt(ctx context.Context, tx pgx.Tx, nodeID string, kind Kind, outcome string, effect bool) (string, error) {
	b, err := Open(ctx, tx, nodeID)
	if err != nil {
		return "", err
	}
	a := b.Of(nodeID, kind)
	switch {
	case a == nil:
		return "", nil
	case effect:
		a.TakeEffect(b.now, outcome)
	default:
		a.Attempt(outcome)
	}
	return a.CorrelationID, b.Save(ctx, tx)
}

// Over ends the open action of a node and a kind as succeeded: its reason has ended. If none is open, the last one with
// the correlation id that has failed is superseded instead: what it was for came about without it.
func Over(ctx context.Context, tx pgx.Tx, nodeID string, kind Kind, correlationID, outcome string) error {
	b, err := Open(ctx, tx, nodeID)
	if err != nil {
		return err
	}
	a := b.Of(nodeID, kind)
	if a == nil {
		return b.overtake(ctx, tx, nodeID, kind, correlationID, outcome)
	}
	if a.EffectAt == nil {
		a.EffectAt = &b.now
	}
	a.Succeed(b.now, outcome)
	return b.Save(ctx, tx)
}

// overtake supersedes the last action of a node, a kind and a correlation id that has failed.
func (b *Book) overtake(ctx context.Context, tx pgx.Tx, nodeID string, kind Kind, correlationID, outcome string) error {
	r, err := pg.One[row](ctx, tx, lockFailed, cmp.Or(nodeID, ControlPlane), names.Of(kind), correlationID)
	if pg.IsNoRows(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("lock the recovery action that has failed: %w", err)
	}
	a := &Action{row: r, changed: true}
	a.State, a.HealthyAt = names.Of(StateSuperseded), &b.now
	a.Outcome = shorten(outcome + ", without this action; before: " + r.Outcome)
	b.all = append(b.all, a)
	return b.Save(ctx, tx)
}

// Issued begins or joins the action of a token that a person was given for a node, and returns its correlation id. If
// none was open it goes on from the rejection that recovery has evidence of. What the node does by itself goes on until
// the token is used.
func Issued(ctx context.Context, tx pgx.Tx, from Beginning) (string, error) {
	b, a, err := fromRejection(ctx, tx, from)
	if err != nil || a == nil {
		return "", err
	}
	return a.CorrelationID, b.Save(ctx, tx)
}

// Enrolled begins or joins the action that brings a node a certificate, notes its effect, and returns its correlation
// id. If none was open it goes on from the rejection that recovery has evidence of. A person's token takes the place of
// what was done for the node before.
func Enrolled(ctx context.Context, tx pgx.Tx, from Beginning, outcome string) (string, error) {
	b, a, err := fromRejection(ctx, tx, from)
	if err != nil || a == nil {
		return "", err
	}
	if byPerson(from.Kind) {
		b.replace(a)
	}
	a.TakeEffect(b.now, outcome)
	return a.CorrelationID, b.Save(ctx, tx)
}

// fromRejection begins or joins an action; nil: the open one is of a newer build.
func fromRejection(ctx context.Context, tx pgx.Tx, from Beginning) (*Book, *Action, error) {
	b, err := Open(ctx, tx, from.NodeID)
	if err != nil {
		return nil, nil, err
	}
	if b.Of(from.NodeID, from.Kind) == nil {
		refused, err := rejectionOf(ctx, tx, from.NodeID)
		if err != nil {
			return nil, nil, err
		}
		from.CorrelationID, from.RejectedAt, from.Reason = refused.CorrelationID, refused.At, refused.reason()
	}
	return b, b.Begin(from), nil
}

// rejection is the first rejection of a node that is not over.
type rejection struct {
	NodeID        string    `db:"node_id"`
	Reason        string    `db:"reason"`
	At            time.Time `db:"observed_at"`
	CorrelationID string    `db:"correlation_id"`
}

// reason returns the reason; unspecified for one of a newer build.
func (r rejection) reason() commonv1.DriftReason {
	out, err := names.Parse[commonv1.DriftReason](r.Reason)
	if err != nil {
		return commonv1.DriftReason_DRIFT_REASON_UNSPECIFIED
	}
	return out
}

func rejectionOf(ctx context.Context, tx pgx.Tx, nodeID string) (rejection, error) {
	out, err := pg.One[rejection](ctx, tx, rejections, []string{nodeID})
	if pg.IsNoRows(err) {
		return rejection{}, nil
	}
	if err != nil {
		return rejection{}, fmt.Errorf("read rejections: %w", err)
	}
	return out, nil
}

// Decided ends the open actions of a node in whose place a person's decision has come, but for the kinds that go on
// under it.
func (b *Book) Decided(nodeID, outcome string, but ...Kind) {
	for _, a := range b.OfNode(nodeID) {
		on := a.kind == StaleTaskSweep
		for _, kind := range but {
			on = on || a.kind == kind
		}
		if !on {
			a.Supersede(b.now, outcome)
		}
	}
}

// Correlated is the correlation id of the open action of a node.
type Correlated struct {
	NodeID        string `db:"node_id"`
	CorrelationID string `db:"correlation_id"`
}

// NoteSessions notes on the open actions of nodes that a session is ready on the certificate that they brought, and
// returns their correlation ids. It appends no event.
func NoteSessions(ctx context.Context, tx pgx.Tx, nodeIDs []string) ([]Correlated, error) {
	out, err := pg.All[Correlated](ctx, tx, noteSessions, nodeIDs, certifiedNames())
	if err != nil {
		return nil, fmt.Errorf("note sessions of recovery actions: %w", err)
	}
	return out, nil
}

// OfSessions returns the correlation ids of the open actions of nodes on whose certificates a session was ready. It
// locks nothing.
func OfSessions(ctx context.Context, tx pgx.Tx, nodeIDs []string) ([]Correlated, error) {
	out, err := pg.All[Correlated](ctx, tx, ofSessions, nodeIDs, certifiedNames())
	if err != nil {
		return nil, fmt.Errorf("read recovery actions of sessions: %w", err)
	}
	return out, nil
}

// certifiedNames returns the kinds whose effect is a certificate, as they are stored.
func certifiedNames() []string {
	out := make([]string, len(certified))
	for i, kind := range certified {
		out[i] = names.Of(kind)
	}
	return out
}
