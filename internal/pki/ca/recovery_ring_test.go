package ca_test

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
)

// ringOf returns a ring of the authority's provisioner, and a key that may follow it.
func ringOf(t *testing.T) (*ca.RecoveryRing, ed25519.PrivateKey, ed25519.PublicKey) {
	t.Helper()
	ring, err := ca.NewRecoveryRing(open(t).ProvisionerKey(), td)
	if err != nil {
		t.Fatal(err)
	}
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return ring, private, public
}

func signed(t *testing.T, ring *ca.RecoveryRing) string {
	t.Helper()
	id, _ := ring.KeyID()
	text, err := ring.Sign(id, recoveryClaims())
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func accepts(t *testing.T, ring *ca.RecoveryRing, text string) {
	t.Helper()
	if got, err := ring.Verify(text); err != nil || cmp.Diff(recoveryClaims(), got) != "" {
		t.Errorf("%+v %v", got, err)
	}
}

// TestARingFollowsItsKeys: the next key verifies before it signs, the one before it until it is retired.
func TestARingFollowsItsKeys(t *testing.T) {
	ring, private, public := ringOf(t)
	id := pki.KeyID(public)
	next := ca.RecoveryKeys{
		Provisioner: true, Private: map[string]ed25519.PrivateKey{id: private},
		Verify: map[string]ed25519.PublicKey{id: public},
	}
	first := signed(t, ring)
	replace := func(k ca.RecoveryKeys) {
		t.Helper()
		if err := ring.Replace(k); err != nil {
			t.Fatal(err)
		}
	}
	replace(next)
	if got, _ := ring.KeyID(); got != ring.Provisioner() {
		t.Fatalf("%s signs", got)
	}
	next.Signing = id
	replace(next)
	second := signed(t, ring)
	accepts(t, ring, first)
	accepts(t, ring, second)
	if _, err := ring.Sign(ring.Provisioner(), recoveryClaims()); err != nil {
		t.Errorf("a token that was offered a moment ago: %v", err)
	}
	next.Provisioner = false
	replace(next)
	accepts(t, ring, second)
	_, err := ring.Verify(first)
	if other, ok := errors.AsType[*ca.UnknownKeyError](err); !ok || !ring.Retired(other.KeyID) || ring.Retired(id) {
		t.Errorf("of the retired key: %v", err)
	}
	if _, err := ring.Sign(ring.Provisioner(), recoveryClaims()); err == nil {
		t.Error("the retired key signs")
	}
	next.Confirmed = func() error { return fault.New(commonv1.Reason_REASON_SIGNING_KEY_UNCONFIRMED, "") }
	replace(next)
	if _, err := ring.Sign(id, recoveryClaims()); !fault.Has(err, commonv1.Reason_REASON_SIGNING_KEY_UNCONFIRMED) {
		t.Errorf("a replica that may have missed the next key: %v", err)
	}
}

// TestARingWithoutThePrivateKeySignsNothing: the present keys stay in use.
func TestARingWithoutThePrivateKeySignsNothing(t *testing.T) {
	ring, _, public := ringOf(t)
	id := pki.KeyID(public)
	if err := ring.Replace(ca.RecoveryKeys{
		Provisioner: true, Signing: id, Verify: map[string]ed25519.PublicKey{id: public},
	}); err == nil {
		t.Error("it signs with a key that is elsewhere")
	}
	if err := ring.Replace(ca.RecoveryKeys{
		Provisioner: true, Verify: map[string]ed25519.PublicKey{"other": public},
	}); err == nil {
		t.Error("a key has the name of another")
	}
	accepts(t, ring, signed(t, ring))
}

// TestATokenNamesTheAlgorithmOfItsKey: the header of a token chooses the key, and not how it verifies.
func TestATokenNamesTheAlgorithmOfItsKey(t *testing.T) {
	ring, private, public := ringOf(t)
	id := pki.KeyID(public)
	if err := ring.Replace(ca.RecoveryKeys{
		Provisioner: true, Signing: id, Private: map[string]ed25519.PrivateKey{id: private},
		Verify: map[string]ed25519.PublicKey{id: public},
	}); err != nil {
		t.Fatal(err)
	}
	parts := strings.Split(strings.TrimPrefix(signed(t, ring), ca.RecoveryPrefix), ".")
	for _, header := range []string{
		`{"alg":"ES256","kid":"` + id + `","typ":"grt+jwt"}`,
		`{"alg":"none","kid":"` + id + `","typ":"grt+jwt"}`,
		`{"alg":"EdDSA","kid":"` + ring.Provisioner() + `","typ":"grt+jwt"}`,
	} {
		text := base64.RawURLEncoding.EncodeToString([]byte(header)) + "." + parts[1]
		text = ca.RecoveryPrefix + text + "." +
			base64.RawURLEncoding.EncodeToString(ed25519.Sign(private, []byte(text)))
		if _, err := ring.Verify(text); !fault.Has(err, commonv1.Reason_REASON_TOKEN_INVALID) {
			t.Errorf("%s: %v", header, err)
		}
	}
}
