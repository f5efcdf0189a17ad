package envelope

import (
	"crypto/ed25519"
	"fmt"

	"github.com/gpuaas/mesh/internal/pki"
)

// Key signs tasks.
type Key struct {
	id      string
	private ed25519.PrivateKey
}

// NewKey returns the signing key of a private key; its id is derived from the public half.
func NewKey(private ed25519.PrivateKey) Key {
	public, _ := private.Public().(ed25519.PublicKey)
	return Key{id: KeyID(public), private: private}
}

// LoadOrCreateKey reads the signing key from a file, or makes the file (mode 0600, under a file lock, so that replicas
// agree).
func LoadOrCreateKey(path string) (Key, error) {
	private, err := pki.LoadOrCreateSigningKey(path)
	if err != nil {
		return Key{}, fmt.Errorf("load task signing key: %w", err)
	}
	return NewKey(private), nil
}

// ID returns the key's id.
func (k Key) ID() string { return k.id }

// Public returns the verifying half.
func (k Key) Public() ed25519.PublicKey {
	public, _ := k.private.Public().(ed25519.PublicKey)
	return public
}

// VerifierSet is the set of public keys whose tasks an agent runs. It does not change; a rotation makes another set,
// which must have a key in common with it.
type VerifierSet = pki.KeySet

// NewVerifierSet returns a set of public keys, each under the id that KeyID returns.
func NewVerifierSet(keys ...ed25519.PublicKey) (*VerifierSet, error) { return pki.NewKeySet(keys...) }

// ParseVerifierSet reads the form of GPUAAS_TASK_SIGNING_PUBKEYS: keyid:base64 separated by commas. An empty set is
// refused.
func ParseVerifierSet(text string) (*VerifierSet, error) { return pki.ParseKeySet(text) }

// KeyID returns the id of a public key.
func KeyID(public ed25519.PublicKey) string { return pki.KeyID(public) }
