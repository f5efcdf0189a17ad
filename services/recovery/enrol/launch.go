package enrol

import (
	"bytes"
	"context"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/services/recovery/identity"
	"github.com/gpuaas/mesh/services/recovery/instance"
)

// checkLaunch decides whether an instance may have a certificate. The mint belongs to (workspace, epoch, instance):
// another key may use it only while the previous certificate was never used, after a wait, and a few times, and the
// earlier certificate is revoked first. An instance that is refused is told to wait if its epoch is the present one and
// to stop if a later one was prepared; how often it was refused and why is reported to lifecycle.
func (e *Enroller) checkLaunch(ctx context.Context, tx pgx.Tx, r *identity.Record, a *redemption,
	m identity.Moment,
) (*repeat, error, error) {
	if r.State == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED {
		return refuseEnded(ctx, tx, r)
	}
	if err := stateRefusal(r, false); err != nil {
		return nil, nil, err
	}
	highest, err := instance.HighestEpoch(ctx, tx, r.WorkspaceID)
	if err != nil {
		return nil, nil, err
	}
	if r.Epoch < highest.Number {
		return e.refuseRegister(ctx, tx, r, fault.New(commonv1.Reason_REASON_EPOCH_SUPERSEDED, ""), m)
	}
	if highest.InstanceID != r.LaunchedInstanceID || a.token.State == "revoked" || a.token.State == "expired" ||
		!m.Now.Before(a.token.ExpiresAt) {
		return e.refuseRegister(ctx, tx, r,
			fault.New(commonv1.Reason_REASON_MINT_CONSUMED, "this instance has no live launch secret"), m)
	}
	if a.token.State == "issued" {
		return nil, nil, unusedKey(ctx, tx, r, a)
	}
	if bytes.Equal(a.token.UsedKey, a.key) {
		done, err := repeatOf(ctx, tx, r, a)
		if fault.Has(err, commonv1.Reason_REASON_TOKEN_CONSUMED) {
			return e.refuseRegister(ctx, tx, r, fault.New(commonv1.Reason_REASON_MINT_CONSUMED, ""), m)
		}
		return done, nil, err
	}
	return e.checkSecondMint(ctx, tx, r, a, m)
}

// refuseEnded refuses a retired instance, and appends the event that it was started again.
func refuseEnded(ctx context.Context, tx pgx.Tx, r *identity.Record) (*repeat, error, error) {
	if err := identity.MarkEnded(ctx, tx, map[string]*identity.Record{r.NodeID: r}); err != nil {
		return nil, nil, err
	}
	if _, err := identity.ReportWoken(ctx, tx, r, identity.Caller{}); err != nil {
		return nil, nil, err
	}
	return nil, fault.New(r.Ended(), "the instance has been retired"), nil
}

func (e *Enroller) checkSecondMint(ctx context.Context, tx pgx.Tx, r *identity.Record, a *redemption,
	m identity.Moment,
) (*repeat, error, error) {
	previous, found, err := identity.SerialByName(ctx, tx, a.token.UsedSerial)
	if err != nil {
		return nil, nil, err
	}
	wait := previous.IssuedAt.Add(e.cfg.MintWait).Sub(m.Now)
	switch {
	case found && previous.Ready, r.Mints > e.cfg.MintLimit, m.RolledBack:
		// In rollback mode the first certificate may be in use without the database having a record of that.
		return e.refuseRegister(ctx, tx, r, fault.New(commonv1.Reason_REASON_MINT_CONSUMED, ""), m)
	case found && wait > 0:
		return e.refuseRegister(ctx, tx, r, fault.New(commonv1.Reason_REASON_MINT_CONSUMED, "", fault.RetryAfter(wait)), m)
	}
	if err := unusedKey(ctx, tx, r, a); err != nil {
		return nil, nil, err
	}
	// The earlier certificate is revoked before the next is signed, so that the two are never valid at the same time.
	if err := identity.RevokeAll(ctx, tx, r); err != nil {
		return nil, nil, err
	}
	r.ConfirmedSession, r.ReplacedNonce = "", ""
	_, err = identity.Save(ctx, tx, r)
	return nil, nil, err
}

// refuseRegister counts a refusal, so that the workspace of an instance that cannot register shows the reason. In
// rollback mode nothing is counted: the count may lead to a recreation, and the refused instance may be newer than the
// database.
func (e *Enroller) refuseRegister(ctx context.Context, tx pgx.Tx, r *identity.Record, why *fault.Error,
	m identity.Moment,
) (*repeat, error, error) {
	if m.RolledBack {
		return nil, why, nil
	}
	r.RefusedRegisters++
	r.LastRefusal = why.Reason
	r.Notice++
	if r.FenceEpoch == 0 {
		r.FenceEpoch = int64(ids.NextWithEra(ids.Fence(0), m.Era)) // lifecycle orders the events of a node by the fence epoch
	}
	if _, err := identity.SaveQuietly(ctx, tx, r); err != nil {
		return nil, nil, err
	}
	return nil, why, nil
}
