package joinstate

import (
	"crypto/ed25519"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/gpuaas/mesh/internal/pki"
)

// Public returns the verifying halves of the keys, in the form in which they are given to services that may only
// verify.
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

// Verifier verifies states by public keys alone. It cannot sign. Safe for concurrent use.
type Verifier struct{ keys atomic.Pointer[Keys] }

// NewVerifier returns a verifier of a set of public keys.
func NewVerifier(set *pki.KeySet) (*Verifier, error) {
	v := &Verifier{}
	return v, v.Replace(set)
}

// Replace replaces the set of public keys.
func (v *Verifier) Replace(set *pki.KeySet) error {
	if set == nil {
		return errors.New("make join state verifier: no key given")
	}
	keys := &Keys{verify: map[string]ed25519.PublicKey{}}
	for _, id := range set.IDs() {
		keys.verify[id], _ = set.Key(id)
	}
	v.keys.Store(keys)
	return nil
}

// Verify returns the state of a byte string that one of the keys has signed; see Keys.Verify.
func (v *Verifier) Verify(signed []byte) (State, error) { return v.keys.Load().Verify(signed) }
