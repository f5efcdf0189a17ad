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

// NewKey names a private key by its public half.
func NewKey(private ed25519.PrivateKey) Key {
	public, _ := private.Public().(ed25519.PublicKey)
	return Key{id: KeyID(public), private: private}
}

// LoadOrCreateKey reads the signing key of a file, or makes it (mode 0600, under a file lock, so that replicas agree).
func LoadOrCreateKey(path string) (Key, error) {
	private, err := pki.LoadOrCreateSigningKey(path)
	if err != nil {
		return Key{}, fmt.Errorf("load task signing key: %w", err)
	}
	return NewKey(private), nil
}

// ID names the key.
func (k Key) ID() string { return k.id }

// Public is the verifying half.
func (k Key) Public() ed25519.PublicKey {
	public, _ := k.private.Public().(ed25519.PublicKey)
	return public
}

// VerifierSet is the set of public keys whose tasks an agent runs. It does not change; a rotation makes another set, which must overlap.
type VerifierSet = pki.KeySet

// NewVerifierSet makes a set of public keys under their own names.
func NewVerifierSet(keys ...ed25519.PublicKey) (*VerifierSet, error) { return pki.NewKeySet(keys...) }

// ParseVerifierSet reads the form of GPUAAS_TASK_SIGNING_PUBKEYS: keyid:base64 separated by commas. An empty set is refused.
func ParseVerifierSet(text string) (*VerifierSet, error) { return pki.ParseKeySet(text) }

// KeyID is the name of a public key.
func KeyID(public ed25519.PublicKey) string { return pki.KeyID(public) }
