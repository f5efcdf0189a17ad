package trust

import (
	"bytes"
	"testing"
	"time"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pki/ca"
)

// TestANodeThatSleptThroughTwoRotations: the ingress refuses its certificate, of which it has no root any more, and its
// recovery token is good as before: the key of tokens is no issuer's. A cross certificate of the next root leads to the
// one before it alone.
func TestANodeThatSleptThroughTwoRotations(t *testing.T) {
	r := newRotating(t)
	p := r.start()
	ring := func() *ca.RecoveryRing {
		t.Helper()
		out, err := ca.NewRecoveryRing(p.deps.Rotating.ProvisionerKey(), domain)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	slept, chain := r.node()
	held := ring()
	token, err := held.Sign(held.Provisioner(), ca.RecoveryClaims{
		TokenID: ids.New(), NodeID: slept, NodeInstanceID: ids.New(), Profile: "site",
		KeySHA256: bytes.Repeat([]byte{7}, 32), IssuedAt: time.Unix(1_700_000_000, 0),
	})
	if err != nil {
		t.Fatal(err)
	}
	accepted := []bool{true, false}
	for i, want := range accepted {
		if _, err := r.ask(p, &recoveryv1.RotateAuthorityRequest{WithRoot: true}); err != nil {
			t.Fatal(err)
		}
		if _, err := p.Rotate(t.Context()); err != nil {
			t.Fatal(err)
		}
		r.sent()
		r.enter(p, phaseBoth)
		if got := r.accepts(chain) == nil; got != want {
			t.Errorf("while both issuers of rotation %d are valid: accepted %t, want %t", i+1, got, want)
		}
		r.longAgo()
		if _, err := r.db.OwnerPool().Exec(t.Context(), `UPDATE recovery.serial SET not_after = mesh.clock()`); err != nil {
			t.Fatal(err)
		}
		r.enter(p, phaseDone)
		// The operator takes the former root out of the file of the ingress, and puts the next one in.
		roots, err := r.signer.Roots(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		r.file = roots[:1]
		r.sent()
		if err := r.accepts(chain); err == nil {
			t.Errorf("its certificate is accepted after rotation %d", i+1)
		}
		p = r.start()
	}
	if got, err := ring().Verify(token); err != nil || got.NodeID != slept {
		t.Errorf("its recovery token: %+v, %v", got, err)
	}
	if _, fresh := r.node(); r.accepts(fresh) != nil {
		t.Errorf("what a recovery brings it: %v", r.accepts(fresh))
	}
}
