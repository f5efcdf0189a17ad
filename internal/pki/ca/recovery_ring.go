package ca

import (
	"crypto"
	"crypto/ed25519"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"

	"github.com/gpuaas/mesh/internal/pki"
)

// RecoveryRing signs and verifies recovery tokens with the keys that are in use. The provisioner's key is the first of
// them; those that follow it are Ed25519 keys of the mesh's set. Safe for concurrent use.
type RecoveryRing struct {
	provisioner *RecoveryTokens
	trustDomain string
	present     atomic.Pointer[ringKeys]
}

// RecoveryKeys are the keys of recovery tokens at one moment.
type RecoveryKeys struct {
	// Provisioner reports whether the provisioner's key verifies.
	Provisioner bool
	// Signing is the id of the key that signs; empty: the provisioner's does.
	Signing string
	// Private and Verify are the keys after the provisioner's that are not retired, by their ids: the private ones that
	// this process has, and the public ones.
	Private map[string]ed25519.PrivateKey
	Verify  map[string]ed25519.PublicKey
	// Retired are the ids of keys that verify no more, apart from the provisioner's.
	Retired []string
	// Confirmed fails if the key that signs may not sign any more. Nil: it always may.
	Confirmed func() error
}

// ringKeys are the keys of a ring, by their ids.
type ringKeys struct {
	signing   string
	known     map[string]*RecoveryTokens
	signs     []string // ids of the known keys that have their private half here
	retired   map[string]bool
	confirmed func() error
}

// NewRecoveryRing returns a ring that has the provisioner's key alone.
func NewRecoveryRing(provisioner crypto.Signer, trustDomain string) (*RecoveryRing, error) {
	first, err := NewRecoveryTokens(provisioner, trustDomain)
	if err != nil {
		return nil, err
	}
	r := &RecoveryRing{provisioner: first, trustDomain: trustDomain}
	return r, r.Replace(RecoveryKeys{Provisioner: true})
}

// Replace puts other keys in place of the present ones.
func (r *RecoveryRing) Replace(k RecoveryKeys) error {
	next := &ringKeys{
		signing: k.Signing, known: map[string]*RecoveryTokens{}, retired: map[string]bool{}, confirmed: k.Confirmed,
	}
	if next.signing == "" {
		next.signing = r.provisioner.keyID
	}
	if k.Provisioner {
		next.known[r.provisioner.keyID] = r.provisioner
		next.signs = append(next.signs, r.provisioner.keyID)
	} else {
		next.retired[r.provisioner.keyID] = true
	}
	for _, id := range slices.Sorted(maps.Keys(k.Verify)) {
		if pki.KeyID(k.Verify[id]) != id {
			return fmt.Errorf("use keys of recovery tokens: %s is the name of another key", id)
		}
		next.known[id] = &RecoveryTokens{public: k.Verify[id], keyID: id, audience: r.provisioner.audience}
		if private := k.Private[id]; private != nil {
			tokens, err := NewRecoveryTokens(private, r.trustDomain)
			if err != nil {
				return err
			}
			next.known[id], next.signs = tokens, append(next.signs, id)
		}
	}
	for _, id := range k.Retired {
		next.retired[id] = true
	}
	if !slices.Contains(next.signs, next.signing) {
		return fmt.Errorf("use keys of recovery tokens: the private key of %s is not here", next.signing)
	}
	r.present.Store(next)
	return nil
}

// Provisioner returns the id of the provisioner's key.
func (r *RecoveryRing) Provisioner() string { return r.provisioner.keyID }

// KeyID returns the id of the key that signs, and all that this process could sign with.
func (r *RecoveryRing) KeyID() (string, []string) {
	now := r.present.Load()
	return now.signing, slices.Clone(now.signs)
}

// Sign returns the text of a token, signed with the key of the given id, which KeyID returned a moment ago.
func (r *RecoveryRing) Sign(keyID string, c RecoveryClaims) (string, error) {
	now := r.present.Load()
	if !slices.Contains(now.signs, keyID) {
		return "", &UnknownKeyError{KeyID: keyID, TokenID: c.TokenID}
	}
	if now.confirmed != nil {
		if err := now.confirmed(); err != nil {
			return "", fmt.Errorf("sign recovery token: %w", err)
		}
	}
	return now.known[keyID].Sign(c)
}

// Verify is RecoveryTokens.Verify with the key that the token names.
func (r *RecoveryRing) Verify(text string) (RecoveryClaims, error) {
	_, _, payload, header, err := splitRecovery(text)
	if err != nil {
		return RecoveryClaims{}, err
	}
	if tokens := r.present.Load().known[header.KeyID]; tokens != nil {
		return tokens.Verify(text)
	}
	return RecoveryClaims{}, &UnknownKeyError{KeyID: header.KeyID, TokenID: payload.TokenID}
}

// Retired reports whether a key verifies no more.
func (r *RecoveryRing) Retired(keyID string) bool { return r.present.Load().retired[keyID] }

// errOnlyVerifies is returned by Sign of a key whose private half is elsewhere.
var errOnlyVerifies = errors.New("sign recovery token: the private key is not here")
