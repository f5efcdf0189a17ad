package recoverykey_test

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"errors"
	"testing"

	"github.com/gpuaas/mesh/internal/recoverykey"
)

// TestAProofIsOfOneKeyOneTokenAndOneRequest checks that a proof is refused if its key, its token or its request is
// another one.
func TestAProofIsOfOneKeyOneTokenAndOneRequest(t *testing.T) {
	ec, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	_, ed, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	publicOf := func(key crypto.Signer) []byte {
		der, err := recoverykey.Public(key)
		if err != nil {
			t.Fatal(err)
		}
		return der
	}
	const token = "grt_token"
	csr := []byte("request")
	for _, key := range []crypto.Signer{ec, ed} {
		proof, err := recoverykey.Sign(key, token, csr)
		if err != nil {
			t.Fatal(err)
		}
		if err := recoverykey.Verify(publicOf(key), token, csr, proof); err != nil {
			t.Errorf("%T: %v", key, err)
		}
		other := crypto.Signer(ec)
		if key == other {
			other = ed
		}
		for name, err := range map[string]error{
			"another token":   recoverykey.Verify(publicOf(key), token+"x", csr, proof),
			"another request": recoverykey.Verify(publicOf(key), token, []byte("request2"), proof),
			"moved boundary":  recoverykey.Verify(publicOf(key), token+"r", []byte("equest"), proof),
			"another key":     recoverykey.Verify(publicOf(other), token, csr, proof),
			"no proof":        recoverykey.Verify(publicOf(key), token, csr, nil),
			"no key":          recoverykey.Verify(nil, token, csr, proof),
		} {
			if !errors.Is(err, recoverykey.ErrProof) {
				t.Errorf("%T, %s: %v, want ErrProof", key, name, err)
			}
		}
	}
}

func TestOnlyKeysThatProveArePublicKeys(t *testing.T) {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := recoverykey.Parse(der); err == nil {
		t.Error("an RSA key was taken")
	}
}
