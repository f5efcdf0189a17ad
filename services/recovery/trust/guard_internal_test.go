package trust

import (
	"context"
	"crypto/x509"
	"errors"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
)

// silent is an authority that cannot be asked.
type silent struct{ ca.Signer }

func (silent) Intermediates(context.Context) ([]*x509.Certificate, error) {
	return nil, errors.New("no answer")
}

// TestWithdrawalsThatWouldLoseTheIssuer: the root that the authority signs under stays, at a replica that cannot ask
// the authority, and at one that asked it before the next issuer began to sign. Such a replica does not bring a former
// issuer back either, as long as it has the one that signs.
func TestWithdrawalsThatWouldLoseTheIssuer(t *testing.T) {
	r := newRotating(t)
	p := r.start()
	made := pki.Fingerprint(bundleOf(t, r.signer).Roots()[0])
	if _, err := r.ask(p, &recoveryv1.RotateAuthorityRequest{WithRoot: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Rotate(t.Context()); err != nil {
		t.Fatal(err)
	}
	before, err := p.signsUnder(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	r.sent()
	r.enter(p, phaseBoth)
	next := r.last().NextRoot
	do := func(p *Preflight, fingerprint string, withdraw bool) error {
		_, err := p.RepairTrust(t.Context(), &recoveryv1.RepairTrustRequest{
			RootFingerprint: fingerprint, Reason: "test", Withdraw: withdraw,
		})
		return err
	}
	tx, err := r.db.OwnerPool().Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	err = p.withdraw(t.Context(), tx, before, nil, next)
	if !fault.Has(err, commonv1.Reason_REASON_AUTHORITY_ROTATION_UNDER_WAY) {
		t.Errorf("the root of the next issuer, which signs by now: %v", err)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.longAgo()
	r.enter(p, phaseDone)
	deps := p.deps
	deps.Signer = silent{deps.Signer}
	blind, err := New(deps, p.cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := do(blind, next, true); !fault.Has(err, commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE) {
		t.Errorf("withdrawn unseen: %v", err)
	}
	if err := do(blind, made, false); !fault.Has(err, commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE) {
		t.Errorf("a former issuer was brought back: %v", err)
	}
	if _, chain := r.node(); pki.FingerprintDER(chain[1]) != r.last().Next ||
		r.count(`SELECT count(*)::int FROM recovery.trusted_issuer`) != 1 {
		t.Error("the next issuer does not sign, or its root is not sent")
	}
}

// TestARotationStandsStill: while the ingress refuses what the authority signs no certificate of the former issuer is
// revoked by force, and in rollback mode nothing of a rotation goes on or is cancelled.
func TestARotationStandsStill(t *testing.T) {
	r := newRotating(t)
	p := r.start()
	old, _ := r.node()
	if _, err := r.ask(p, &recoveryv1.RotateAuthorityRequest{}); err != nil {
		t.Fatal(err)
	}
	exec := func(sql string) {
		t.Helper()
		if _, err := r.db.OwnerPool().Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	rounds := func() rotationRow {
		t.Helper()
		for range 4 {
			if _, err := p.Rotate(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		return r.last()
	}
	const mode = `UPDATE recovery.rollback SET `
	exec(mode + `state = 'active', since = mesh.clock()`)
	if row := rounds(); row.Next != "" {
		t.Errorf("in rollback mode: %+v", row)
	}
	if _, err := r.ask(p, &recoveryv1.RotateAuthorityRequest{Cancel: true}); !fault.Has(err,
		commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK) {
		t.Errorf("cancelled in rollback mode: %v", err)
	}
	exec(mode + `state = 'none'`)
	r.enter(p, phaseBoth)
	if _, err := p.RepairTrust(t.Context(), &recoveryv1.RepairTrustRequest{
		RootFingerprint: r.last().Former, Reason: "its key is known", Withdraw: true,
	}); err != nil {
		t.Fatal(err)
	}
	const preflight = `UPDATE recovery.ca_preflight SET version = version + 1, state = `
	exec(preflight + `'mismatch'`)
	counts := func() int {
		return r.count(`SELECT count(*)::int FROM recovery.serial WHERE state = 'next' AND node_id = '` + old + `'`)
	}
	if row := rounds(); row.WaitsFor != waitsForMismatch || counts() != 1 {
		t.Errorf("revoked while nothing is issued: %+v", row)
	}
	exec(preflight + `'ok'`)
	if row := rounds(); row.WaitsFor != waitsForRevoked || counts() != 0 {
		t.Errorf("not revoked after the repair: %+v", row)
	}
}
