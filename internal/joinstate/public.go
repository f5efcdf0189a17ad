package joinstate

import (
	"crypto/ed25519"
	"errors"
	"fmt"
	"slices"

	"github.com/gpuaas/mesh/internal/pki"
)

// Public is the verifying half of the keys, in the form in which it is handed to whoever may only verify.
func (k *Keys) Public() (*pki.KeySet, error) {
	publics := make([]ed25519.PublicKey, 0, len(k.verify))
	for _, public := range k.verify {
		publics = append(publics, slices.Clone(public))
	}
	set, err := pki.NewKeySet(publics...)
	if err != nil {
		return nil, fmt.Errorf("publish join state keys: %w", err)
	}
	return set, nil
}

// Verifier verifies states by public keys alone. It can sign nothing.
type Verifier struct{ keys Keys }

// NewVerifier makes a verifier of a set of public keys.
func NewVerifier(set *pki.KeySet) (*Verifier, error) {
	v := &Verifier{keys: Keys{verify: map[string]ed25519.PublicKey{}}}
	for _, id := range set.IDs() {
		v.keys.verify[id], _ = set.Key(id)
	}
	if len(v.keys.verify) == 0 {
		return nil, errors.New("make join state verifier: no key given")
	}
	return v, nil
}

// Verify is Keys.Verify.
func (v *Verifier) Verify(signed []byte) (State, error) { return v.keys.Verify(signed) }
