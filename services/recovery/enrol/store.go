package enrol

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/identity"
	"github.com/gpuaas/mesh/services/recovery/identity/keyowner"
	"github.com/gpuaas/mesh/services/recovery/tokens"
	"github.com/gpuaas/mesh/services/recovery/trust"
)

// store makes the certificate count: it writes the node instance, the serial, the use of the token and the end of the
// claim in one transaction. Until that commits the certificate is accepted nowhere.
func (e *Enroller) store(ctx context.Context, a *redemption, c *claim, issued signed) (*repeat, error) {
	serial := identity.Serial{
		Serial: issued.serial, KeySHA256: a.key, ChainPEM: issued.chainPEM, IssuerFingerprint: issued.issuer,
		NotBefore: issued.notBefore, NotAfter: issued.notAfter,
	}
	made := &repeat{serial: serial}
	err := pg.InTx(ctx, e.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		if err := trust.Refuse(ctx, tx); err != nil {
			return err // it was found out while the authority signed
		}
		r, err := identity.LockOne(ctx, tx, c.nodeID)
		if err != nil {
			return err
		}
		made.record = r
		if err := a.mayStore(r); err != nil {
			return err // decided while the authority signed
		}
		if err := keyowner.Refuse(ctx, tx, c.nodeID, a.key); err != nil {
			return err // certified for another node while the authority signed
		}
		if err := endClaim(ctx, tx, c.id, "done", issued.serial, ""); err != nil {
			return err
		}
		m, err := identity.ReadMoment(ctx, tx)
		if err != nil {
			return err
		}
		before := r.InstanceID
		switch a.token.Kind {
		case KindRecovery:
			err = e.storeRecovery(ctx, tx, r, a, c, serial, m)
		case KindBundle:
			err = e.storeBundle(ctx, tx, r, a, c, serial, m)
		case KindBootstrap, KindLaunch:
			err = storeFirst(ctx, tx, r, a, c, serial, m)
		}
		if err != nil {
			return err
		}
		if made.offered, err = e.offer(ctx, tx, r, serial.Serial, a.recoveryKey, m.Era); err != nil {
			return err
		}
		given := obs.From(ctx).CorrelationID
		if ctx, err = noteEnrolled(ctx, tx, a, before, serial.Serial); err != nil {
			return err
		}
		err = reportAttempt(ctx, tx, attempt{
			nodeID: r.NodeID, way: a.token.Kind, given: given, correlation: obs.From(ctx).CorrelationID,
		})
		if err != nil {
			return err
		}
		if _, err := identity.Save(ctx, tx, r); err != nil {
			return err
		}
		return failpoint.Hit("recovery.enroll.before_commit")
	})
	return made, e.stored(ctx, c, serial.Serial, "store enrolment", err)
}

// mayStore returns why a node may not be given the certificate that was signed, nil if it may.
func (a *redemption) mayStore(r *identity.Record) error {
	reason := commonv1.Reason_REASON_UNSPECIFIED
	switch a.token.Kind {
	case KindBootstrap, KindLaunch:
		return stateRefusal(r, a.token.Kind == KindBootstrap)
	case KindRecovery:
		reason = identity.RecoveryRefusal(r)
	case KindBundle:
		reason = bundleRefusal(r)
	}
	if reason != commonv1.Reason_REASON_UNSPECIFIED {
		return fault.New(reason, "")
	}
	return nil
}

// storeFirst makes the certificate of a bootstrap token or a launch secret count. All recovery tokens of the node's
// earlier life end.
func storeFirst(ctx context.Context, tx pgx.Tx, r *identity.Record, a *redemption, c *claim, s identity.Serial,
	m identity.Moment,
) error {
	if err := useOnce(ctx, tx, r, a, s); err != nil {
		return err
	}
	if a.token.Kind == KindLaunch {
		r.Mints++
		// The instance has enrolled: lifecycle learns of it with the admission, and later refusals are counted from zero.
		r.RefusedRegisters, r.LastRefusal = 0, commonv1.Reason_REASON_UNSPECIFIED
	}
	return identity.Activate(ctx, tx, r, c.instanceID, s, "recovery", "enrolled by "+string(a.token.Kind)+" token", m)
}

// useOnce records that a token with a secret was used for a certificate, and ends the node's recovery tokens.
func useOnce(ctx context.Context, tx pgx.Tx, r *identity.Record, a *redemption, s identity.Serial) error {
	tag, err := pg.Exec(ctx, tx, useToken, a.token.ID, a.key, s.Serial, a.presented.Hash)
	if err != nil {
		return fmt.Errorf("use token: %w", err)
	}
	if tag.RowsAffected() != 1 {
		return fault.New(commonv1.Reason_REASON_TOKEN_CONSUMED, "the token was revoked meanwhile")
	}
	_, err = tokens.EndAll(ctx, tx, r.NodeID, tokens.EndedEnrolled)
	return err
}

// answer returns the response with everything that an agent needs to connect.
func (e *Enroller) answer(ctx context.Context, made *repeat) (*recoveryv1.EnrollResponse, error) {
	r, s := made.record, made.serial
	keys, err := e.deps.TaskKeys()
	if err != nil {
		return nil, fmt.Errorf("read task keys: %w", err)
	}
	now, err := pg.Value[time.Time](ctx, e.deps.Pool, readClock)
	if err != nil {
		return nil, fmt.Errorf("read clock: %w", err)
	}
	text, err := e.textOf(made.offered)
	if err != nil {
		return nil, err
	}
	profile, err := e.deps.Profiles.Active(ctx, r.Profile)
	if err != nil {
		return nil, err
	}
	return &recoveryv1.EnrollResponse{
		RecoveryToken: text, NodeId: r.NodeID, NodeInstanceId: r.InstanceID, CertificateChainPem: s.ChainPEM,
		Profile: profile,
		Policy:  NodePolicy(e.deps.Policy.Current()), TaskSigningPubkeys: keys, ServerTime: timestamppb.New(now),
		NodeName: r.Name, WorkspaceId: r.WorkspaceID,
		Epoch: r.Epoch,
	}, nil
}
