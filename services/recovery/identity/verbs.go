package identity

import (
	"context"
	"fmt"
	"log/slog"
	"strings"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/identity/joinkeys"
	"github.com/gpuaas/mesh/services/recovery/identity/verbs"
	"github.com/gpuaas/mesh/services/recovery/rollback"
)

// Actor is the person on whose decision something changes.
type Actor struct {
	Subject string
	Roles   []string
}

// Change applies a verb and returns the node and the position of its event. The node is shown as `fencing` until
// lifecycle has acknowledged the fence. In rollback mode every verb is refused, since the state that the person sees
// may be older than the node.
func (s *Identities) Change(ctx context.Context, nodeID string, verb recoveryv1.IdentityVerb, reason string,
	by Actor,
) (*Record, string, error) {
	reason = strings.TrimSpace(reason)
	if reason == "" {
		return nil, "", fault.New(commonv1.Reason_REASON_REASON_REQUIRED, "")
	}
	var r *Record
	var pos string
	err := pg.InTx(ctx, s.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		if r, err = LockOne(ctx, tx, nodeID); err != nil {
			return err
		}
		if pos, err = change(ctx, tx, r, verb, reason, by); err != nil {
			return err
		}
		return failpoint.Hit("recovery.change_identity.before_commit")
	})
	if err != nil {
		return nil, "", fmt.Errorf("change identity: %w", err)
	}
	s.committed()
	s.deps.Wake.Urge() // the replica that sends the fence to lifecycle is woken by the event's number
	s.deps.Logger.InfoContext(ctx, "identity changed", slog.String(obs.KeyNodeID, nodeID),
		slog.String("state", names.Of(r.State)),
		slog.String("by", by.Subject), slog.Int64("fence_epoch", r.FenceEpoch))
	if err := failpoint.Hit("recovery.change_identity.after_commit"); err != nil {
		return nil, "", err
	}
	return r, pos, nil
}

func change(ctx context.Context, tx pgx.Tx, r *Record, verb recoveryv1.IdentityVerb, reason string, by Actor) (string,
	error,
) {
	m, err := ReadMoment(ctx, tx)
	if err != nil {
		return "", err
	}
	if m.RolledBack {
		return "", rollback.Refusal()
	}
	copied := ""
	if Copied(r.Alarm) {
		copied = r.Alarm
	}
	to, err := verbs.Transition(r.State, copied, verb, by.Roles)
	if err != nil {
		return "", err
	}
	switch verb {
	case recoveryv1.IdentityVerb_IDENTITY_VERB_REACTIVATE:
		if err := reactivate(ctx, tx, r, by.Subject, reason, m); err != nil {
			return "", err
		}
	case recoveryv1.IdentityVerb_IDENTITY_VERB_RETIRE:
		if err := Retire(ctx, tx, r, by.Subject, reason, m); err != nil {
			return "", err
		}
	case recoveryv1.IdentityVerb_IDENTITY_VERB_HOLD, recoveryv1.IdentityVerb_IDENTITY_VERB_QUARANTINE,
		recoveryv1.IdentityVerb_IDENTITY_VERB_FENCE, recoveryv1.IdentityVerb_IDENTITY_VERB_UNSPECIFIED:
		r.Enter(to, by.Subject, reason, m.Now, m.Era)
	}
	return Save(ctx, tx, r)
}

// reactivate lets a node in again. If two hosts may have its identity it first ends all that either of them has, so
// that neither comes back by itself: the node is active, of a node instance that no host has, and without a certificate
// until an operator's token gives it one. Only a person can tell which of the two hosts is the machine, and brings the
// token there. With the node instance ends also what a database that was restored does not know: a certificate of the
// former one would be taken over at its next session.
func reactivate(ctx context.Context, tx pgx.Tx, r *Record, by, reason string, m Moment) error {
	if Copied(r.Alarm) {
		if err := endMaterial(ctx, tx, r, endedByPerson); err != nil {
			return err
		}
		r.InstanceID, r.JoinKeys = ids.New(), []string{joinkeys.None}
		reason += " (the certificates and tokens of both hosts are ended: `gpuaas nodes bundle` brings the node back)"
	}
	r.reactivate(by, reason, m.Now, m.Era)
	return nil
}

// Retire ends an identity for good, with its certificates and its tokens. The caller must save the record.
func Retire(ctx context.Context, tx pgx.Tx, r *Record, by, reason string, m Moment) error {
	if err := endMaterial(ctx, tx, r, endedByRetirement); err != nil {
		return err
	}
	r.Enter(commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED, by, reason, m.Now, m.Era)
	return nil
}

// What ended a node's recovery tokens, as package tokens shows it.
const (
	endedByPerson     = "operator"
	endedByRetirement = "retired"
)

// endMaterial ends each certificate and each token of a node, used or not. It changes the record, which the caller must
// save.
func endMaterial(ctx context.Context, tx pgx.Tx, r *Record, endedBy string) error {
	if err := RevokeAll(ctx, tx, r); err != nil {
		return err
	}
	if _, err := pg.Exec(ctx, tx, revokeTokens, r.NodeID); err != nil {
		return fmt.Errorf("revoke tokens: %w", err)
	}
	if _, err := pg.Exec(ctx, tx, endRecoveryTokens, r.NodeID, endedBy); err != nil {
		return fmt.Errorf("revoke recovery tokens: %w", err)
	}
	return nil
}

// Activate gives a node a new node instance with one certificate, which is in the next slot until a session is ready on
// it. Earlier certificates are revoked. Generations go on from where they were, so that no gate and no agent ever sees
// one twice; none of them is confirmed. The caller must save the record.
func Activate(ctx context.Context, tx pgx.Tx, r *Record, instanceID string, s Serial, by, reason string,
	m Moment,
) error {
	if err := RevokeAll(ctx, tx, r); err != nil {
		return err
	}
	r.InstanceID, r.Confirmed, r.Alarm = instanceID, 0, AlarmNone
	r.JoinKeys = []string{joinkeys.None}
	r.ConfirmedSession, r.ReplacedNonce = "", ""
	if err := Offer(ctx, tx, r, s); err != nil {
		return err
	}
	r.CertificateEnds, r.IssuerFingerprint = s.NotAfter, s.IssuerFingerprint
	r.Enter(commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE, by, reason, m.Now, m.Era)
	r.decided = actionEnrol
	return nil
}
