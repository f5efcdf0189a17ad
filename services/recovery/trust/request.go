package trust

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/recovery/rollback"
	"github.com/gpuaas/mesh/services/recovery/trust/roots"
)

// RotateAuthority records a rotation, which Rotate carries out, or cancels the one that is announced.
func (p *Preflight) RotateAuthority(ctx context.Context, req *recoveryv1.RotateAuthorityRequest) (
	*recoveryv1.RotateAuthorityResponse, error,
) {
	by, reason := rpc.ActorFrom(ctx), strings.TrimSpace(req.GetReason())
	entry := audit.Entry{
		Action: "authority.rotate", SubjectType: "authority", SubjectID: "nodes",
		Details: map[string]any{
			"with_root": req.GetWithRoot(), "cancel": req.GetCancel(), "dry_run": req.GetDryRun(),
		},
	}
	if reason == "" {
		return nil, p.deps.Audit.Refuse(ctx, entry, fault.New(commonv1.Reason_REASON_REASON_REQUIRED, ""))
	}
	out := &recoveryv1.RotateAuthorityResponse{}
	present, err := p.present(ctx)
	if err != nil && !req.GetCancel() {
		return nil, p.deps.Audit.Refuse(ctx, entry, err)
	}
	err = pg.InTx(ctx, p.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		out.Rotation, out.Pos = nil, ""
		var row *rotationRow
		var fresh bool
		var err error
		if req.GetCancel() {
			if err := rollback.Refuse(ctx, tx); err != nil {
				return err
			}
			row, err = cancelRotation(ctx, tx, req.GetDryRun())
			fresh = true
		} else {
			row, fresh, err = beginRotation(ctx, tx, present, req, by, reason)
		}
		if err != nil || req.GetDryRun() {
			return err
		}
		out.Rotation = row.message()
		if !fresh {
			return nil
		}
		done := entry
		done.Actor, done.Reason = by, reason
		done.Details = map[string]any{"rotation_id": row.ID, "with_root": row.WithRoot, "cancel": req.GetCancel()}
		out.Pos, err = audit.Record(ctx, tx, done)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("rotate authority: %w", p.deps.Audit.Refuse(ctx, entry, pg.Fault(err)))
	}
	p.deps.Wake.Notify()
	return out, nil
}

// present returns what the authority signs with now, which a rotation exchanges.
func (p *Preflight) present(ctx context.Context) (*authority, error) {
	if p.deps.Rotating == nil {
		return nil, fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
			"the node authority is a process of its own, which this mesh does not rotate",
			fault.Remedy("exchange its issuer there, after the ingress trusts the next root (node_ca_file)"))
	}
	ctx, cancel := context.WithTimeout(ctx, p.cfg.Ask)
	defer cancel()
	is, err := ask(ctx, p.deps.Signer)
	if err == nil && len(is.anchors) < 2 {
		err = errors.New("the root of the issuer is not among those of the authority")
	}
	if _, typed := fault.As(err); err != nil && !typed {
		err = fault.New(commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE, "", fault.Cause(err))
	}
	return is, err
}

func beginRotation(ctx context.Context, tx pgx.Tx, present *authority, req *recoveryv1.RotateAuthorityRequest, by,
	reason string,
) (*rotationRow, bool, error) {
	known, err := pg.One[rotationRow](ctx, tx, readRotationOf, by, req.GetIdempotencyKey())
	switch {
	case err == nil && known.WithRoot == req.GetWithRoot():
		return &known, false, nil
	case err == nil:
		return nil, false, fault.New(commonv1.Reason_REASON_IDEMPOTENCY_KEY_REUSED, "")
	case !pg.IsNoRows(err):
		return nil, false, fmt.Errorf("read rotation: %w", err)
	}
	if err := rollback.Refuse(ctx, tx); err != nil {
		return nil, false, err
	}
	if err := Refuse(ctx, tx); err != nil {
		return nil, false, err // the present issuer is not trusted: what differs is repaired first
	}
	if req.GetWithRoot() {
		if err := roots.CheckRoom(ctx, tx, ""); err != nil {
			return nil, false, err // it would wait for room as soon as its root is made
		}
	}
	if req.GetDryRun() {
		_, err := pg.One[rotationRow](ctx, tx, readOpenRotation)
		switch {
		case pg.IsNoRows(err):
			return nil, false, nil
		case err != nil:
			return nil, false, fmt.Errorf("read rotation: %w", err)
		}
		return nil, false, fault.New(commonv1.Reason_REASON_AUTHORITY_ROTATION_UNDER_WAY, "")
	}
	row, err := pg.One[rotationRow](ctx, tx, insertRotation, ids.New(), req.GetWithRoot(), present.fingerprint(),
		present.anchors[1], waitsForIssuer, reason, by, req.GetIdempotencyKey())
	if pg.IsNoRows(err) {
		return nil, false, fault.New(commonv1.Reason_REASON_AUTHORITY_ROTATION_UNDER_WAY, "")
	}
	if err != nil {
		return nil, false, fmt.Errorf("write rotation: %w", err)
	}
	return &row, true, row.append(ctx, tx)
}

// cancelRotation ends the rotation that is announced. The next issuer's root is not sent any more.
func cancelRotation(ctx context.Context, tx pgx.Tx, check bool) (*rotationRow, error) {
	row, err := pg.One[rotationRow](ctx, tx, lockOpenRotation)
	if pg.IsNoRows(err) {
		return nil, fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "no rotation of the node authority is under way",
			fault.Remedy("`gpuaas ca status` shows the last rotation"))
	}
	if err != nil {
		return nil, fmt.Errorf("lock rotation: %w", err)
	}
	if row.Phase != phaseAnnounced {
		return nil, fault.New(commonv1.Reason_REASON_AUTHORITY_ROTATION_UNDER_WAY,
			"the next issuer signs already: this rotation cannot be cancelled",
			fault.Remedy("wait until it is done (`gpuaas ca status`), then begin another one"))
	}
	if check {
		return &row, nil
	}
	if row.WithRoot && row.NextRoot != "" {
		if _, err := roots.Distrust(ctx, tx, row.NextRoot); err != nil {
			return nil, err
		}
	}
	if _, err := pg.Exec(ctx, tx, deleteHolders); err != nil {
		return nil, fmt.Errorf("delete which replicas have the next issuer: %w", err)
	}
	row.Phase, row.WaitsFor = phaseCancelled, ""
	return &row, row.save(ctx, tx)
}

// RepairTrust has replicas of nodeapi trust the root that the authority signs under now. With withdraw it ends that for
// another root. If it names the former root or the former issuer of a rotation, certificates of that issuer are
// revoked, and the rotation ends.
func (p *Preflight) RepairTrust(ctx context.Context, req *recoveryv1.RepairTrustRequest) (
	*recoveryv1.RepairTrustResponse, error,
) {
	by, reason := rpc.ActorFrom(ctx), strings.TrimSpace(req.GetReason())
	entry := audit.Entry{
		Action: "authority.repair", SubjectType: "authority", SubjectID: "nodes",
		Details: map[string]any{"root": req.GetRootFingerprint(), "withdraw": req.GetWithdraw()},
	}
	if reason == "" {
		return nil, p.deps.Audit.Refuse(ctx, entry, fault.New(commonv1.Reason_REASON_REASON_REQUIRED, ""))
	}
	var root *x509.Certificate
	signs, unasked := p.signsUnder(ctx)
	if !req.GetWithdraw() {
		err := p.checkIssuer(ctx, p.deps.Pool)
		if err == nil && unasked != nil {
			err = fault.New(commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE,
				"it is not known which root the authority signs under", fault.Cause(unasked),
				fault.Remedy("ask again once `gpuaas ca status` shows what the authority signs with"))
		}
		if err == nil {
			root, err = repaired(signs, req.GetRootFingerprint())
		}
		if err != nil {
			return nil, p.deps.Audit.Refuse(ctx, entry, pg.Fault(err))
		}
	}
	out := &recoveryv1.RepairTrustResponse{}
	err := pg.InTx(ctx, p.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		err := rollback.Refuse(ctx, tx)
		if err != nil {
			return err
		}
		if req.GetWithdraw() {
			err = p.withdraw(ctx, tx, signs, unasked, req.GetRootFingerprint())
		} else {
			err = p.repair(ctx, tx, root, reason, by)
		}
		if err != nil {
			return err
		}
		done := entry
		done.Actor, done.Reason = by, reason
		if out.Pos, err = audit.Record(ctx, tx, done); err != nil {
			return err
		}
		out.Issuers, err = roots.List(ctx, tx)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("repair trust: %w", p.deps.Audit.Refuse(ctx, entry, pg.Fault(err)))
	}
	p.deps.Wake.Notify()
	p.deps.Changed.Notify()
	p.deps.Logger.WarnContext(ctx, "what the ingress trusts was changed by a person", slog.String("by", by),
		slog.String("root", req.GetRootFingerprint()), slog.Bool("withdraw", req.GetWithdraw()))
	return out, nil
}

// signsUnder returns the roots that the authority's present issuer leads to.
func (p *Preflight) signsUnder(ctx context.Context) ([]*x509.Certificate, error) {
	ctx, cancel := context.WithTimeout(ctx, p.cfg.Ask)
	defer cancel()
	issuers, err := p.deps.Signer.Intermediates(ctx)
	if err != nil {
		return nil, err
	}
	if len(issuers) == 0 {
		return nil, errNoIssuer
	}
	roots, err := p.deps.Signer.Roots(ctx)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(slices.Clone(roots), func(root *x509.Certificate) bool {
		return issuers[0].CheckSignatureFrom(root) != nil
	}), nil
}

// repaired returns the root of a fingerprint, which must be one that the authority signs under.
func repaired(signs []*x509.Certificate, fingerprint string) (*x509.Certificate, error) {
	for _, root := range signs {
		if pki.Fingerprint(root) == fingerprint {
			return root, nil
		}
	}
	return nil, fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
		"the authority does not sign under the root "+fingerprint,
		fault.Unmet("the fingerprint is that of a root which the authority signs under"),
		fault.Remedy("`gpuaas ca status` shows the roots that it signs under: compare with the authority's own record, then "+
			"name one of them"))
}

// repair has the ingress trust a root, if this replica still has the issuer that signs.
func (p *Preflight) repair(ctx context.Context, tx pgx.Tx, root *x509.Certificate, reason, by string) error {
	if err := p.checkIssuer(ctx, tx); err != nil {
		return err
	}
	if err := roots.Trust(ctx, tx, root, roots.OfRepair, reason, by); err != nil {
		return err
	}
	return noteRepaired(ctx, tx, pki.Fingerprint(root), by)
}

// withdraw ends the sending of a root. The error is why it is not known which roots the authority signs under, of which
// signs are. For the fingerprint of the issuer that the database names it gives that issuer up.
func (p *Preflight) withdraw(
	ctx context.Context, tx pgx.Tx, signs []*x509.Certificate, unasked error, fingerprint string,
) error {
	if its, err := p.giveUp(ctx, tx, fingerprint); its || err != nil {
		return err
	}
	open, err := pg.One[rotationRow](ctx, tx, lockOpenRotation)
	switch {
	case pg.IsNoRows(err):
	case err != nil:
		return fmt.Errorf("lock rotation: %w", err)
	case open.Phase == phaseBoth && (fingerprint == open.Former || open.WithRoot && fingerprint == open.FormerRoot):
		if open.Forced {
			return nil
		}
		open.Forced, open.WaitsFor = true, waitsForRevoked
		return open.save(ctx, tx)
	case open.WithRoot && fingerprint == open.NextRoot: // it may have begun to sign after signs was read
		return fault.New(commonv1.Reason_REASON_AUTHORITY_ROTATION_UNDER_WAY,
			"the root belongs to the next issuer of a rotation",
			fault.Remedy("cancel the rotation while it is announced: `gpuaas ca rotate --cancel --reason TEXT`"))
	}
	if unasked != nil {
		return fault.New(commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE,
			"it is not known whether the authority signs under this root", fault.Cause(unasked),
			fault.Remedy("ask again once `gpuaas ca status` shows what the authority signs with"))
	}
	if slices.ContainsFunc(signs, func(root *x509.Certificate) bool { return pki.Fingerprint(root) == fingerprint }) {
		// What a repair has added may go again, once the files of the ingress have it: the preflight sees if they do not.
		if repaired, err := roots.EndRepair(ctx, tx, fingerprint); err != nil || repaired {
			return err
		}
		return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "the authority signs under this root",
			fault.Unmet("no repair has added this root"),
			fault.Remedy("rotate the authority first: `gpuaas ca rotate --with-root --reason TEXT`"))
	}
	found, err := roots.Distrust(ctx, tx, fingerprint)
	if err == nil && !found {
		err = fault.New(commonv1.Reason_REASON_NOT_FOUND, "replicas of nodeapi are not sent the root "+fingerprint,
			fault.Remedy("`gpuaas ca status` shows which roots they are sent; one of a file is taken out of node_ca_file"))
	}
	return err
}
