package pki

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// MaxKeys bounds a key set: it leaves room for an old and a new key, and for mistakes in rotations.
const MaxKeys = 16

// KeyID returns the id of a public key: the first 16 hexadecimal digits of its SHA-256.
func KeyID(public ed25519.PublicKey) string {
	sum := sha256.Sum256(public)
	return hex.EncodeToString(sum[:8])
}

// KeySet is a set of Ed25519 public keys by which signatures are verified. It does not change; a rotation makes another
// set.
type KeySet struct {
	keys map[string]ed25519.PublicKey
}

// NewKeySet makes a set of public keys under their own ids.
func NewKeySet(keys ...ed25519.PublicKey) (*KeySet, error) {
	set := &KeySet{keys: map[string]ed25519.PublicKey{}}
	for _, key := range keys {
		if err := set.add(KeyID(key), key); err != nil {
			return nil, err
		}
	}
	if len(set.keys) == 0 {
		return nil, errors.New("make key set: it is empty")
	}
	return set, nil
}

// ParseKeySet reads keyid:base64 separated by commas. An empty set is refused: no signature would verify with it.
func ParseKeySet(text string) (*KeySet, error) {
	set := &KeySet{keys: map[string]ed25519.PublicKey{}}
	for entry := range strings.SplitSeq(text, ",") {
		entry = strings.TrimSpace(entry)
		if entry == "" {
			continue
		}
		id, encoded, ok := strings.Cut(entry, ":")
		if !ok || id == "" {
			return nil, errors.New("parse key set: an entry is not keyid:base64")
		}
		key, err := base64.StdEncoding.DecodeString(encoded)
		if err != nil {
			return nil, fmt.Errorf("parse key set: key %q: %w", id, err)
		}
		if err := set.add(id, key); err != nil {
			return nil, err
		}
	}
	if len(set.keys) == 0 {
		return nil, errors.New("parse key set: it is empty")
	}
	return set, nil
}

func (s *KeySet) add(id string, key ed25519.PublicKey) error {
	if len(key) != ed25519.PublicKeySize {
		return fmt.Errorf("make key set: key %q has %d bytes", id, len(key))
	}
	// If a key could stand under the id of another, a rotation could retire an id and keep its key.
	if id != KeyID(key) {
		return fmt.Errorf("make key set: key %q is named %s", id, KeyID(key))
	}
	if len(s.keys) >= MaxKeys {
		return fmt.Errorf("make key set: more than %d keys", MaxKeys)
	}
	s.keys[id] = bytes.Clone(key)
	return nil
}

// String returns the form that ParseKeySet reads, sorted by key id.
func (s *KeySet) String() string {
	entries := make([]string, 0, len(s.keys))
	for _, id := range s.IDs() {
		entries = append(entries, id+":"+base64.StdEncoding.EncodeToString(s.keys[id]))
	}
	return strings.Join(entries, ",")
}

// IDs returns the ids of the keys, sorted.
func (s *KeySet) IDs() []string {
	return slices.Sorted(maps.Keys(s.keys))
}

// Has reports whether the set holds a key.
func (s *KeySet) Has(keyID string) bool {
	_, ok := s.Key(keyID)
	return ok
}

// Key returns the key of an id. A nil set holds none.
func (s *KeySet) Key(keyID string) (ed25519.PublicKey, bool) {
	if s == nil {
		return nil, false
	}
	key, ok := s.keys[keyID]
	return key, ok
}
