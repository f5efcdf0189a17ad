package trust

import (
	"errors"
	"os"
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/services/recovery/trust/roots"
)

// fill has replicas of nodeapi sent as many roots as may be.
func (r *rotating) fill() {
	r.t.Helper()
	if _, err := r.db.OwnerPool().Exec(r.t.Context(), `INSERT INTO recovery.trusted_issuer
		(fingerprint, name, certificate, not_after, origin, reason, decided_by)
		SELECT 'root ' || i, '', '', mesh.clock(), 'repair', '', 'test' FROM generate_series(1, $1) i`,
		roots.Most); err != nil {
		r.t.Fatal(err)
	}
}

// TestARotationWithoutRoomForItsRoot: it is refused at its beginning. If the room is taken afterwards the status names
// what it waits for, once, and it goes on when a root is withdrawn.
func TestARotationWithoutRoomForItsRoot(t *testing.T) {
	r := newRotating(t)
	p := r.start()
	r.fill()
	for _, dry := range []bool{true, false} {
		_, err := r.ask(p, &recoveryv1.RotateAuthorityRequest{WithRoot: true, DryRun: dry})
		f, ok := fault.As(err)
		if !ok || f.Reason != commonv1.Reason_REASON_PRECONDITION_FAILED || !strings.Contains(f.Remedy, "--withdraw") ||
			r.count(`SELECT count(*)::int FROM recovery.authority_rotation`) != 0 {
			t.Errorf("with no room, dry run %t: %v", dry, err)
		}
	}
	if _, err := r.ask(p, &recoveryv1.RotateAuthorityRequest{DryRun: true}); err != nil {
		t.Errorf("without a root of its own: %v", err)
	}
	if _, err := r.db.OwnerPool().Exec(t.Context(), `DELETE FROM recovery.trusted_issuer`); err != nil {
		t.Fatal(err)
	}
	if _, err := r.ask(p, &recoveryv1.RotateAuthorityRequest{WithRoot: true}); err != nil {
		t.Fatal(err)
	}
	r.fill()
	for range 3 {
		if _, err := p.Rotate(t.Context()); err != nil {
			t.Fatalf("while there is no room: %v", err)
		}
	}
	answer, err := p.GetTrust(t.Context(), &recoveryv1.GetTrustRequest{})
	if is := answer.GetRotation(); err != nil || !strings.Contains(is.GetWaitsFor(), "gpuaas ca repair --withdraw") ||
		is.GetNextFingerprint() != "" || is.GetVersion() != 2 {
		t.Errorf("shown: %v, %v", is, err)
	}
	if _, err := p.RepairTrust(t.Context(), &recoveryv1.RepairTrustRequest{
		RootFingerprint: "root 1", Reason: "test", Withdraw: true,
	}); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Rotate(t.Context()); err != nil || r.last().WaitsFor != waitsForReplicas || r.last().Next == "" {
		t.Errorf("with room again: %+v, %v", r.last(), err)
	}
}

// TestARotationWhoseIssuerIsNotMade: the status names the replica that cannot make it, and what helps.
func TestARotationWhoseIssuerIsNotMade(t *testing.T) {
	r := newRotating(t)
	p := r.start()
	if _, err := r.ask(p, &recoveryv1.RotateAuthorityRequest{WithRoot: true}); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.RemoveAll(r.dir), os.WriteFile(r.dir, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	for range 4 {
		if _, err := p.Rotate(t.Context()); err == nil {
			t.Fatal("an issuer was made without a directory")
		}
	}
	if row := r.last(); !strings.Contains(row.WaitsFor, p.deps.Replica) || !strings.Contains(row.WaitsFor, "ca_dir") ||
		row.Version != 2 {
		t.Errorf("%+v", row)
	}
}
