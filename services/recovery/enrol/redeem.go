package enrol

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/services/recovery/identity"
	"github.com/gpuaas/mesh/services/recovery/identity/keyowner"
	"github.com/gpuaas/mesh/services/recovery/rollback"
	"github.com/gpuaas/mesh/services/recovery/tokens"
	"github.com/gpuaas/mesh/services/recovery/trust"
	"github.com/gpuaas/mesh/services/recovery/wave"
)

// redemption is one attempt to enrol, after its proof.
type redemption struct {
	presented Presented
	token     token
	csr       []byte
	key       []byte // SHA-256 of the CSR's public key
	// recoveryKey is the key to which the next recovery token is bound; empty for none.
	recoveryKey []byte

	joinState []byte // as it was presented
	continues bool   // the node keeps its node instance: by a recovery token or a bundle alone

	// The following are of a recovery token alone.
	claims ca.RecoveryClaims
	row    tokens.Row
}

// Enroll turns a token into a certificate; see the package comment for the order. from is the caller's network address,
// for limits alone.
func (e *Enroller) Enroll(ctx context.Context, from string, req *recoveryv1.EnrollRequest) (*recoveryv1.EnrollResponse,
	error,
) {
	who := audit.Entry{
		Action: "node.enrol", Actor: "anonymous", SubjectType: "enrolment",
		Details: map[string]any{"address": from},
	}
	resp, kind, repeated, err := e.enroll(ctx, from, req, &who)
	if who.NodeID != "" || fault.Has(err, commonv1.Reason_REASON_TOKEN_INVALID) {
		// The node or its token may be of the history that the database has lost.
		err = wave.Soften(ctx, e.deps.Pool, rollback.SoftenError(ctx, e.deps.Pool, err))
	}
	e.count("token", repeated, err)
	noteForeignKey(&who, err)
	if who.NodeID != "" {
		ctx = correlated(ctx, req.GetCorrelationId())
		e.reportRefusal(ctx, attempt{
			nodeID: who.NodeID, way: kind, keyLost: req.GetTokenMissing().GetKeyLost(),
		}, err)
	}
	return resp, e.deps.Audit.Refuse(ctx, who, err)
}

// noteForeignKey adds to an audit entry the node that a refused key certifies.
func noteForeignKey(entry *audit.Entry, err error) {
	var foreign *keyowner.OtherNodeError
	if errors.As(err, &foreign) {
		entry.Details["certified_node_id"] = foreign.NodeID
	}
}

// enroll adds to who the facts that the caller has proved of itself, as it proves them. Before that, callers are not
// distinguished.
func (e *Enroller) enroll(ctx context.Context, from string, req *recoveryv1.EnrollRequest,
	who *audit.Entry,
) (*recoveryv1.EnrollResponse, Kind, bool, error) {
	if err := e.perAddress.Allow(from, time.Now()); err != nil {
		return nil, "", false, err
	}
	switch {
	case req.GetTokenMissing() != nil && req.GetToken() == "":
		return nil, KindRecovery, false, e.refuseMissing(ctx, req, who)
	case req.GetToken() == "" && len(req.GetCsr()) == 0:
		return nil, "", false, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "the request has no token and no CSR")
	}
	presented, err := ParseToken(req.GetToken())
	if err != nil {
		return nil, "", false, err
	}
	resp, repeated, err := e.redeem(ctx, presented, req, who)
	return resp, presented.Kind, repeated, err
}

// redeem is enroll for a token of a known form.
func (e *Enroller) redeem(ctx context.Context, presented Presented, req *recoveryv1.EnrollRequest,
	who *audit.Entry,
) (*recoveryv1.EnrollResponse, bool, error) {
	// The bucket's key is the hash of the whole token, so that a caller without the token cannot empty its owner's bucket.
	if err := e.perProof.Allow(string(presented.Hash), time.Now()); err != nil {
		return nil, false, err
	}
	a, err := e.prove(ctx, presented, req)
	if err != nil {
		return nil, false, err
	}
	who.SubjectType, who.SubjectID, who.NodeID, who.Actor = "node", a.token.NodeID, a.token.NodeID, "node/"+a.token.NodeID
	if err := e.allowNode(a.token.NodeID); err != nil {
		return nil, false, err
	}
	ctx = obs.With(correlated(ctx, req.GetCorrelationId()), obs.Correlation{NodeID: a.token.NodeID})
	c, done, err := e.claimToken(ctx, a)
	if err != nil {
		return nil, false, err
	}
	if done != nil {
		resp, err := e.answer(ctx, done)
		return resp, true, err
	}
	issued, err := e.sign(ctx, c, a.csr, c.instanceID)
	if err != nil {
		e.release(ctx, c, err)
		return nil, false, err
	}
	if err := failpoint.Hit("recovery.enroll.after_sign"); err != nil {
		return nil, false, err
	}
	made, err := e.store(ctx, a, c, issued)
	if err != nil {
		return nil, false, err
	}
	r, serial := made.record, made.serial
	e.deps.Logger.InfoContext(ctx, "node enrolled", slog.String("name", r.Name),
		slog.String(obs.KeyNodeInstanceID, r.InstanceID),
		slog.String("serial", serial.Serial), slog.String("kind", string(a.token.Kind)))
	if err := failpoint.Hit("recovery.enroll.after_commit"); err != nil {
		return nil, false, err
	}
	resp, err := e.answer(ctx, made)
	return resp, false, err
}

// prove checks all that can be checked without changing anything: the token's hash or signature, its time, and that the
// caller holds the keys.
func (e *Enroller) prove(ctx context.Context, presented Presented, req *recoveryv1.EnrollRequest) (*redemption, error) {
	if presented.Kind == KindRecovery {
		return e.proveRecovery(ctx, presented, req)
	}
	t, err := pg.One[token](ctx, e.deps.Pool, readToken, presented.ID, string(presented.Kind))
	switch {
	case pg.IsNoRows(err):
		return nil, invalid("no such token")
	case err != nil:
		return nil, fmt.Errorf("read token: %w", err)
	case subtle.ConstantTimeCompare(t.Hash, presented.Hash) != 1:
		return nil, invalid("its secret is wrong")
	}
	now, err := pg.Value[time.Time](ctx, e.deps.Pool, readClock)
	if err != nil {
		return nil, fmt.Errorf("read clock: %w", err)
	}
	parsed, err := ca.CheckCSR(req.GetCsr(), pki.NodeID(e.cfg.TrustDomain, t.NodeID))
	if err != nil {
		return nil, err
	}
	key, err := keyOf(parsed)
	if err != nil {
		return nil, err
	}
	// An expired token is final for a machine alone, and not for the key that used it: the answer may have been lost. An
	// instance is told to wait, since the launch that prepared it decides about it.
	if t.Kind != KindLaunch && !now.Before(t.ExpiresAt) && !bytes.Equal(t.UsedKey, key) {
		return nil, fault.New(commonv1.Reason_REASON_TOKEN_EXPIRED, "")
	}
	if err := checkRecoveryKey(req.GetRecoveryPublicKey(), key); err != nil {
		return nil, err
	}
	return &redemption{
		presented: presented, token: t, csr: req.GetCsr(), key: key, recoveryKey: req.GetRecoveryPublicKey(),
		joinState: req.GetJoinState(),
	}, nil
}

func keyOf(csr *x509.CertificateRequest) ([]byte, error) {
	der, err := x509.MarshalPKIXPublicKey(csr.PublicKey)
	if err != nil {
		return nil, fault.New(commonv1.Reason_REASON_CSR_REFUSED, "", fault.Cause(err))
	}
	sum := sha256.Sum256(der)
	return sum[:], nil
}

// repeat is an enrolment that is complete: by this request, or before by one of the same key.
type repeat struct {
	record  *identity.Record
	serial  identity.Serial
	offered *tokens.Row // the recovery token that comes with it; nil for none
}

// claimToken decides about an attempt under the node's lock. A refusal that changes rows is committed before it is
// returned.
func (e *Enroller) claimToken(ctx context.Context, a *redemption) (*claim, *repeat, error) {
	var c *claim
	var done *repeat
	var refused error
	err := pg.InTx(ctx, e.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		c, done, refused = nil, nil, nil
		if err := trust.Refuse(ctx, tx); err != nil {
			return err
		}
		r, err := identity.LockOne(ctx, tx, a.token.NodeID)
		if err != nil {
			return err
		}
		if err := a.lock(ctx, tx); err != nil {
			return err
		}
		m, err := identity.ReadMoment(ctx, tx)
		if err != nil {
			return err
		}
		switch a.token.Kind {
		case KindLaunch:
			done, refused, err = e.checkLaunch(ctx, tx, r, a, m)
		case KindBootstrap:
			done, refused, err = e.checkBootstrap(ctx, tx, r, a, m)
		case KindRecovery:
			done, refused, err = e.checkRecovery(ctx, tx, r, a, m)
		case KindBundle:
			done, refused, err = e.checkBundle(ctx, tx, r, a, m)
		}
		if err != nil || refused != nil {
			return err
		}
		if done != nil {
			done.offered, err = e.offer(ctx, tx, r, done.serial.Serial, a.recoveryKey, m.Era)
			return err
		}
		if c, err = takeClaim(ctx, tx, r, a.token, a.key, e.cfg.ClaimLease, m.Now); err != nil {
			return err
		}
		if a.continues {
			c.instanceID = r.InstanceID
		}
		return failpoint.Hit("recovery.enroll.before_claim_commit")
	})
	if err != nil {
		return nil, nil, fmt.Errorf("claim enrolment: %w", err)
	}
	if refused != nil {
		e.committed()
		return nil, nil, refused
	}
	return c, done, nil
}

// lock reads the token's row again, under the lock on the node's row.
func (a *redemption) lock(ctx context.Context, tx pgx.Tx) error {
	if a.token.Kind == KindRecovery {
		return a.lockRecovery(ctx, tx)
	}
	t, err := pg.One[token](ctx, tx, lockToken, a.token.ID)
	if err != nil {
		return fmt.Errorf("lock token: %w", err)
	}
	if subtle.ConstantTimeCompare(t.Hash, a.presented.Hash) != 1 {
		return invalid("it was replaced") // an operator requested it again
	}
	a.token = t
	return nil
}

// repeatOf returns the certificate that this key was given with this token, if it still counts.
func repeatOf(ctx context.Context, tx pgx.Tx, r *identity.Record, a *redemption) (*repeat, error) {
	if a.token.State != "used" || !bytes.Equal(a.token.UsedKey, a.key) {
		return nil, nil
	}
	s, found, err := identity.SerialByKey(ctx, tx, r.NodeID, a.key)
	if err != nil {
		return nil, err
	}
	if s.Unreadable {
		return nil, fault.New(commonv1.Reason_REASON_RECORD_UNREADABLE, "")
	}
	live := s.State == commonv1.SerialState_SERIAL_STATE_NEXT || s.State == commonv1.SerialState_SERIAL_STATE_CURRENT
	if !found || !live || s.InstanceID != r.InstanceID {
		return nil, fault.New(commonv1.Reason_REASON_TOKEN_CONSUMED, "the certificate of this token has been replaced since")
	}
	return &repeat{record: r, serial: s}, nil
}

func (e *Enroller) checkBootstrap(ctx context.Context, tx pgx.Tx, r *identity.Record, a *redemption,
	m identity.Moment,
) (*repeat, error, error) {
	switch {
	case a.token.State == "expired" || !m.Now.Before(a.token.ExpiresAt) && !bytes.Equal(a.token.UsedKey, a.key):
		return nil, nil, fault.New(commonv1.Reason_REASON_TOKEN_EXPIRED, "")
	case a.token.State == "revoked":
		return nil, nil, fault.New(commonv1.Reason_REASON_TOKEN_CONSUMED, "the token has been revoked")
	}
	if err := stateRefusal(r, true); err != nil {
		return nil, nil, err
	}
	if a.token.State != "used" {
		return nil, nil, unusedKey(ctx, tx, r, a)
	}
	done, err := repeatOf(ctx, tx, r, a)
	if err != nil || done != nil {
		return done, nil, err
	}
	return e.reused(ctx, tx, r, a, m)
}

// reused refuses a token that was used with another key, ends all tokens of its node and puts the node on hold.
func (e *Enroller) reused(ctx context.Context, tx pgx.Tx, r *identity.Record, a *redemption,
	m identity.Moment,
) (*repeat, error, error) {
	if m.RolledBack {
		// The key that used the token may be of the history that is lost, so the node is not put on hold.
		return nil, rollback.Refusal(), nil
	}
	// The token has two holders, and recovery cannot tell which of them is the machine it was issued for.
	if _, err := pg.Exec(ctx, tx, revokeTokens, r.NodeID); err != nil {
		return nil, nil, fmt.Errorf("revoke token family: %w", err)
	}
	if _, err := tokens.EndAll(ctx, tx, r.NodeID, tokens.EndedReuse); err != nil {
		return nil, nil, err
	}
	reason := "a " + string(a.token.Kind) + " token was used with a second key"
	r.Hold(identity.AlarmTokenReuse, reason, m.Now, m.Era)
	r.Alarm = identity.AlarmTokenReuse
	if _, err := identity.Save(ctx, tx, r); err != nil {
		return nil, nil, err
	}
	e.deps.Logger.WarnContext(ctx, "token used with a second key", slog.String("token_id", a.token.ID),
		slog.String("kind", string(a.token.Kind)))
	return nil, fault.New(commonv1.Reason_REASON_TOKEN_CONSUMED, ""), nil
}

// unusedKey refuses a key for which this node was given a certificate in an earlier enrolment, or that certifies
// another node: other machines may have such a key by now.
func unusedKey(ctx context.Context, tx pgx.Tx, r *identity.Record, a *redemption) error {
	_, found, err := identity.SerialByKey(ctx, tx, r.NodeID, a.key)
	if err != nil {
		return err
	}
	if found {
		return fault.New(commonv1.Reason_REASON_CSR_REFUSED, "the key was used by this node before",
			fault.Remedy("make a new key and ask again"))
	}
	return keyowner.Refuse(ctx, tx, r.NodeID, a.key)
}
