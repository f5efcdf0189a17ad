package enrol

import (
	"context"
	"fmt"
	"log/slog"

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
	"github.com/gpuaas/mesh/services/recovery/identity/judge"
	"github.com/gpuaas/mesh/services/recovery/identity/keyowner"
	"github.com/gpuaas/mesh/services/recovery/tokens"
	"github.com/gpuaas/mesh/services/recovery/trust"
	"github.com/gpuaas/mesh/services/recovery/wave"
)

// Renew issues the next certificate over an admitted session. The present one stays valid until a session is ready on
// the next. The same key is given its chain again while half its life remains; after that a new key is required.
func (e *Enroller) Renew(ctx context.Context, req *recoveryv1.RenewCertificateRequest) (Renewed, error) {
	s, repeated, err := e.renew(ctx, req)
	err = wave.Refuse(ctx, e.deps.Pool, wave.LimitsOf(e.deps.Policy), req.GetNodeId(), err)
	e.count("session", repeated, err)
	if fault.Has(err, commonv1.Reason_REASON_KEY_REUSE) {
		refused := audit.Entry{
			Action: "node.renew", Actor: "node/" + req.GetNodeId(), SubjectType: "node", SubjectID: req.GetNodeId(),
			NodeID:  req.GetNodeId(),
			Details: map[string]any{"serial": req.GetSerial()},
		}
		noteForeignKey(&refused, err)
		err = e.deps.Audit.Refuse(ctx, refused, err)
	}
	return s, err
}

func (e *Enroller) renew(ctx context.Context, req *recoveryv1.RenewCertificateRequest) (Renewed, bool, error) {
	if err := e.allowNode(req.GetNodeId()); err != nil {
		return Renewed{}, false, err
	}
	csr, err := ca.CheckCSR(req.GetCsr(), pki.NodeID(e.cfg.TrustDomain, req.GetNodeId()))
	if err != nil {
		return Renewed{}, false, err
	}
	key, err := keyOf(csr)
	if err != nil {
		return Renewed{}, false, err
	}
	if err := checkRecoveryKey(req.GetRecoveryPublicKey(), key); err != nil {
		return Renewed{}, false, err
	}
	c, found, err := e.claimRenewal(ctx, req, key)
	if err != nil {
		return Renewed{}, false, err
	}
	if c == nil {
		out, err := e.renewed(found)
		return out, true, err
	}
	issued, err := e.sign(ctx, c, req.GetCsr(), req.GetNodeInstanceId())
	if err != nil {
		e.release(ctx, c, err)
		return Renewed{}, false, err
	}
	if err := failpoint.Hit("recovery.renew.after_sign"); err != nil {
		return Renewed{}, false, err
	}
	serial := identity.Serial{
		Serial: issued.serial, KeySHA256: key, ChainPEM: issued.chainPEM, IssuerFingerprint: issued.issuer,
		NotBefore: issued.notBefore, NotAfter: issued.notAfter,
	}
	stored, err := e.storeRenewal(ctx, req, c, serial)
	if err != nil {
		return Renewed{}, false, err
	}
	e.deps.Logger.InfoContext(ctx, "certificate renewed", slog.String(obs.KeyNodeID, req.GetNodeId()),
		slog.String("serial", serial.Serial))
	if err := failpoint.Hit("recovery.renew.after_commit"); err != nil {
		return Renewed{}, false, err
	}
	out, err := e.renewed(stored)
	return out, false, err
}

// Renewed is what a renewal gives: a certificate, and the recovery token that counts with it, if the agent gave a key.
type Renewed struct {
	identity.Serial

	RecoveryToken string
}

// renewal is a certificate with the row of the token that comes with it.
type renewal struct {
	serial  identity.Serial
	offered *tokens.Row
}

func (e *Enroller) renewed(r renewal) (Renewed, error) {
	text, err := e.textOf(r.offered)
	return Renewed{Serial: r.serial, RecoveryToken: text}, err
}

// mayRenew locks the node and returns its record if the session may renew: only the session that is offered work may.
func mayRenew(ctx context.Context, tx pgx.Tx, req *recoveryv1.RenewCertificateRequest) (*identity.Record, error) {
	r, err := identity.LockOne(ctx, tx, req.GetNodeId())
	if err != nil {
		return nil, err
	}
	if reason := judge.RefusalOf(r.State); reason != commonv1.Reason_REASON_UNSPECIFIED {
		return nil, fault.New(reason, "")
	}
	switch {
	case r.InstanceID != req.GetNodeInstanceId():
		return nil, fault.New(commonv1.Reason_REASON_IDENTITY_MISMATCH, "")
	case r.ConfirmedSession == "" || r.ConfirmedSession != req.GetSessionId():
		return nil, fault.New(commonv1.Reason_REASON_SESSION_SUPERSEDED, "only the admitted session renews")
	case r.CurrentSerial != req.GetSerial():
		return nil, fault.New(commonv1.Reason_REASON_SERIAL_UNKNOWN, "")
	}
	return r, nil
}

// claimRenewal returns a claim, or the certificate that this key was given before.
func (e *Enroller) claimRenewal(ctx context.Context, req *recoveryv1.RenewCertificateRequest, key []byte) (*claim,
	renewal, error,
) {
	var c *claim
	var found renewal
	err := pg.InTx(ctx, e.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		c = nil
		if err := trust.Refuse(ctx, tx); err != nil {
			return err
		}
		r, err := mayRenew(ctx, tx, req)
		if err != nil {
			return err
		}
		m, err := identity.ReadMoment(ctx, tx)
		if err != nil {
			return err
		}
		s, known, err := identity.SerialByKey(ctx, tx, r.NodeID, key)
		if err != nil {
			return err
		}
		if s.Unreadable {
			return fault.New(commonv1.Reason_REASON_RECORD_UNREADABLE, "")
		}
		if known {
			live := s.InstanceID == r.InstanceID &&
				(s.State == commonv1.SerialState_SERIAL_STATE_NEXT || s.State == commonv1.SerialState_SERIAL_STATE_CURRENT)
			// Half the life is counted from IssuedAt, since not_before is dated back for clocks that are behind.
			if !live || s.NotAfter.Sub(m.Now) < s.NotAfter.Sub(s.IssuedAt)/2 {
				return fault.New(commonv1.Reason_REASON_CSR_REFUSED, "the key was certified before",
					fault.Remedy("make a new key and ask again"))
			}
			found.serial = s
			found.offered, err = e.offer(ctx, tx, r, s.Serial, req.GetRecoveryPublicKey(), m.Era)
			return err
		}
		if err := keyowner.Refuse(ctx, tx, r.NodeID, key); err != nil {
			return err
		}
		c, err = takeClaim(ctx, tx, r, token{}, key, e.cfg.ClaimLease, m.Now)
		return err
	})
	if err != nil {
		return nil, renewal{}, fmt.Errorf("claim renewal: %w", err)
	}
	return c, found, nil
}

func (e *Enroller) storeRenewal(ctx context.Context, req *recoveryv1.RenewCertificateRequest, c *claim,
	s identity.Serial,
) (renewal, error) {
	out := renewal{serial: s}
	err := pg.InTx(ctx, e.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		if err := trust.Refuse(ctx, tx); err != nil {
			return err // it was found out while the authority signed
		}
		r, err := mayRenew(ctx, tx, req)
		if err != nil {
			return err // decided while the authority signed
		}
		if err := keyowner.Refuse(ctx, tx, r.NodeID, s.KeySHA256); err != nil {
			return err // certified for another node while the authority signed
		}
		if err := endClaim(ctx, tx, c.id, "done", s.Serial, ""); err != nil {
			return err
		}
		if err := identity.Offer(ctx, tx, r, s); err != nil {
			return err
		}
		m, err := identity.ReadMoment(ctx, tx)
		if err != nil {
			return err
		}
		if out.offered, err = e.offer(ctx, tx, r, s.Serial, req.GetRecoveryPublicKey(), m.Era); err != nil {
			return err
		}
		if _, err := identity.Save(ctx, tx, r); err != nil {
			return err
		}
		return failpoint.Hit("recovery.renew.before_commit")
	})
	return out, e.stored(ctx, c, s.Serial, "store renewal", err)
}
