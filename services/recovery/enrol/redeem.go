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
	"google.golang.org/protobuf/types/known/timestamppb"

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
	"github.com/gpuaas/mesh/services/recovery/rollback"
	"github.com/gpuaas/mesh/services/recovery/wave"
)

// redemption is one attempt to enrol, after its proof.
type redemption struct {
	presented Presented
	token     token
	csr       []byte
	key       []byte // SHA-256 of the CSR's public key
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
	resp, repeated, err := e.enroll(ctx, from, req, &who)
	if who.NodeID != "" || fault.Has(err, commonv1.Reason_REASON_TOKEN_INVALID) {
		// The node or its token may be of the history that the database has lost.
		err = wave.Soften(ctx, e.deps.Pool, rollback.SoftenError(ctx, e.deps.Pool, err))
	}
	e.count("token", repeated, err)
	noteForeignKey(&who, err)
	return resp, e.deps.Audit.Refuse(ctx, who, err)
}

// noteForeignKey adds to an audit entry the node that a refused key certifies.
func noteForeignKey(entry *audit.Entry, err error) {
	var foreign *identity.ForeignKeyError
	if errors.As(err, &foreign) {
		entry.Details["certified_node_id"] = foreign.NodeID
	}
}

// enroll adds to who the facts that the caller has proved of itself, as it proves them. Before that, callers are not
// distinguished.
func (e *Enroller) enroll(ctx context.Context, from string, req *recoveryv1.EnrollRequest,
	who *audit.Entry,
) (*recoveryv1.EnrollResponse, bool, error) {
	if err := e.addresses.allow(from, time.Now()); err != nil {
		return nil, false, err
	}
	presented, err := ParseToken(req.GetToken())
	if err != nil {
		return nil, false, err
	}
	// The bucket's key is the hash of the whole token, so that a caller without the token cannot empty its owner's bucket.
	if err := e.tokens.allow(string(presented.Hash), time.Now()); err != nil {
		return nil, false, err
	}
	a, err := e.prove(ctx, presented, req.GetCsr())
	if err != nil {
		return nil, false, err
	}
	who.SubjectType, who.SubjectID, who.NodeID, who.Actor = "node", a.token.NodeID, a.token.NodeID, "node/"+a.token.NodeID
	if err := e.allowNode(a.token.NodeID); err != nil {
		return nil, false, err
	}
	ctx = obs.With(ctx, obs.Correlation{NodeID: a.token.NodeID})
	c, done, err := e.claimToken(ctx, a)
	if err != nil {
		return nil, false, err
	}
	if done != nil {
		resp, err := e.answer(ctx, done.record, done.serial)
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
	r, serial, err := e.store(ctx, a, c, issued)
	if err != nil {
		return nil, false, err
	}
	e.deps.Logger.InfoContext(ctx, "node enrolled", slog.String("name", r.Name),
		slog.String(obs.KeyNodeInstanceID, r.InstanceID),
		slog.String("serial", serial.Serial), slog.String("kind", string(a.token.Kind)))
	if err := failpoint.Hit("recovery.enroll.after_commit"); err != nil {
		return nil, false, err
	}
	resp, err := e.answer(ctx, r, serial)
	return resp, false, err
}

// prove checks all that can be checked without changing anything: the token's hash, its time, and that the caller holds
// the key.
func (e *Enroller) prove(ctx context.Context, presented Presented, csr []byte) (*redemption, error) {
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
	// An expired token is final for a machine alone. An instance is told to wait, since the launch that prepared it
	// decides about it.
	if t.Kind == KindBootstrap && !now.Before(t.ExpiresAt) {
		return nil, fault.New(commonv1.Reason_REASON_TOKEN_EXPIRED, "")
	}
	parsed, err := ca.CheckCSR(csr, pki.NodeID(e.cfg.TrustDomain, t.NodeID))
	if err != nil {
		return nil, err
	}
	key, err := keyOf(parsed)
	if err != nil {
		return nil, err
	}
	return &redemption{presented: presented, token: t, csr: csr, key: key}, nil
}

func keyOf(csr *x509.CertificateRequest) ([]byte, error) {
	der, err := x509.MarshalPKIXPublicKey(csr.PublicKey)
	if err != nil {
		return nil, fault.New(commonv1.Reason_REASON_CSR_REFUSED, "", fault.Cause(err))
	}
	sum := sha256.Sum256(der)
	return sum[:], nil
}

// repeat is an enrolment that was completed before and whose key is used to enrol again.
type repeat struct {
	record *identity.Record
	serial identity.Serial
}

// claimToken decides about an attempt under the node's lock. A refusal that changes rows is committed before it is
// returned.
func (e *Enroller) claimToken(ctx context.Context, a *redemption) (*claim, *repeat, error) {
	var c *claim
	var done *repeat
	var refused error
	err := pg.InTx(ctx, e.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		c, done, refused = nil, nil, nil
		r, err := identity.LockOne(ctx, tx, a.token.NodeID)
		if err != nil {
			return err
		}
		t, err := pg.One[token](ctx, tx, lockToken, a.token.ID)
		if err != nil {
			return fmt.Errorf("lock token: %w", err)
		}
		if subtle.ConstantTimeCompare(t.Hash, a.presented.Hash) != 1 {
			return invalid("it was replaced") // an operator requested it again
		}
		m, err := identity.ReadMoment(ctx, tx)
		if err != nil {
			return err
		}
		a.token = t
		switch t.Kind {
		case KindLaunch:
			done, refused, err = e.checkLaunch(ctx, tx, r, a, m)
		case KindBootstrap:
			done, refused, err = e.checkBootstrap(ctx, tx, r, a, m)
		}
		if err != nil || done != nil || refused != nil {
			return err
		}
		if c, err = takeClaim(ctx, tx, r.NodeID, t.ID, a.key, e.cfg.ClaimLease, m.Now); err != nil {
			return err
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
	case a.token.State == "expired" || !m.Now.Before(a.token.ExpiresAt):
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
	if m.RolledBack {
		// The key that used the token may be of the history that is lost, so the node is not put on hold.
		return nil, rollback.Refusal(), nil
	}
	// The token has two holders, and recovery cannot tell which of them is the machine it was issued for.
	_, err = pg.Exec(ctx, tx, revokeTokens, r.NodeID)
	if err != nil {
		return nil, nil, fmt.Errorf("revoke token family: %w", err)
	}
	reason := "a bootstrap token was used with a second key"
	r.Hold(identity.AlarmTokenReuse, reason, m.Now, m.Era)
	r.Alarm = identity.AlarmTokenReuse
	if _, err := identity.Save(ctx, tx, r); err != nil {
		return nil, nil, err
	}
	e.deps.Logger.WarnContext(ctx, "bootstrap token used with a second key", slog.String("token_id", a.token.ID))
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
	return identity.RefuseForeignKey(ctx, tx, r.NodeID, a.key)
}

// store makes the certificate count: it writes the node instance, the serial, the use of the token and the end of the
// claim in one transaction. Until that commits the certificate is accepted nowhere.
func (e *Enroller) store(ctx context.Context, a *redemption, c *claim, issued signed) (*identity.Record,
	identity.Serial, error,
) {
	serial := identity.Serial{
		Serial: issued.serial, KeySHA256: a.key, ChainPEM: issued.chainPEM, IssuerFingerprint: issued.issuer,
		NotBefore: issued.notBefore, NotAfter: issued.notAfter,
	}
	var r *identity.Record
	err := pg.InTx(ctx, e.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		if r, err = identity.LockOne(ctx, tx, c.nodeID); err != nil {
			return err
		}
		if err := stateRefusal(r, a.token.Kind == KindBootstrap); err != nil {
			return err // decided while the authority signed
		}
		if err := identity.RefuseForeignKey(ctx, tx, c.nodeID, a.key); err != nil {
			return err // certified for another node while the authority signed
		}
		if err := endClaim(ctx, tx, c.id, "done", issued.serial, ""); err != nil {
			return err
		}
		tag, err := pg.Exec(ctx, tx, useToken, a.token.ID, a.key, issued.serial, a.presented.Hash)
		if err != nil {
			return fmt.Errorf("use token: %w", err)
		}
		if tag.RowsAffected() != 1 {
			return fault.New(commonv1.Reason_REASON_TOKEN_CONSUMED, "the token was revoked meanwhile")
		}
		m, err := identity.ReadMoment(ctx, tx)
		if err != nil {
			return err
		}
		if a.token.Kind == KindLaunch {
			r.Mints++
			// The instance has enrolled: lifecycle learns of it with the admission, and later refusals are counted from zero.
			r.RefusedRegisters, r.LastRefusal = 0, commonv1.Reason_REASON_UNSPECIFIED
		}
		if err := identity.Activate(ctx, tx, r, c.instanceID, serial, "recovery",
			"enrolled by "+string(a.token.Kind)+" token", m); err != nil {
			return err
		}
		if _, err := identity.Save(ctx, tx, r); err != nil {
			return err
		}
		return failpoint.Hit("recovery.enroll.before_commit")
	})
	return r, serial, e.stored(ctx, c, serial.Serial, "store enrolment", err)
}

// answer returns the response with everything that an agent needs to connect.
func (e *Enroller) answer(ctx context.Context, r *identity.Record, s identity.Serial) (*recoveryv1.EnrollResponse,
	error,
) {
	keys, err := e.deps.TaskKeys()
	if err != nil {
		return nil, fmt.Errorf("read task keys: %w", err)
	}
	now, err := pg.Value[time.Time](ctx, e.deps.Pool, readClock)
	if err != nil {
		return nil, fmt.Errorf("read clock: %w", err)
	}
	return &recoveryv1.EnrollResponse{
		NodeId: r.NodeID, NodeInstanceId: r.InstanceID, CertificateChainPem: s.ChainPEM, Profile: e.deps.Profile(),
		Policy: NodePolicy(e.deps.Policy.Current()), TaskSigningPubkeys: keys, ServerTime: timestamppb.New(now),
		NodeName: r.Name, WorkspaceId: r.WorkspaceID,
		Epoch: r.Epoch,
	}, nil
}
