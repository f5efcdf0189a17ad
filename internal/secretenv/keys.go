package secretenv

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"

	"github.com/gpuaas/mesh/internal/config"
)

const (
	keySize = 32
	idSize  = 8
	maxKeys = 64
)

// Keys is a set of keys: the first seals and makes digests, every one opens and compares.
type Keys struct {
	first *key
	byID  map[string]*key
}

// key holds the keys that are derived from one line of a key file.
type key struct {
	id     string
	aead   cipher.AEAD
	digest []byte
}

const remedy = "the file has a line for each key, 32 random bytes in base64, as `openssl rand -base64 32` writes " +
	"them; the first one seals. " +
	"Restore the file of this mesh: a new one cannot open the values that are stored"

// Load reads the key set from a file that only its owner may read.
func Load(file config.SecretFile) (*Keys, error) {
	text, err := file.Read()
	if err != nil {
		return nil, fmt.Errorf("load keys of workload secrets: %w (%s)", err, remedy)
	}
	keys, err := Parse(text.Reveal())
	if err != nil {
		return nil, fmt.Errorf("load keys of workload secrets: %s: %w (%s)", file, err, remedy)
	}
	return keys, nil
}

// Parse reads a key set: one key a line, 32 bytes in base64. Empty lines and lines that begin with # are passed over.
func Parse(text string) (*Keys, error) {
	keys := &Keys{byID: map[string]*key{}}
	for n, line := range strings.Split(text, "\n") {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		raw, err := base64.StdEncoding.DecodeString(line)
		if err != nil || len(raw) != keySize {
			return nil, fmt.Errorf("line %d is not a key", n+1) // without the decoder's error, which quotes the line
		}
		one, err := derive(raw)
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", n+1, err)
		}
		if keys.byID[one.id] != nil {
			return nil, fmt.Errorf("line %d repeats a key", n+1)
		}
		keys.byID[one.id] = one
		if keys.first == nil {
			keys.first = one
		}
	}
	switch {
	case keys.first == nil:
		return nil, errors.New("there is no key in it")
	case len(keys.byID) > maxKeys:
		return nil, fmt.Errorf("there are more than %d keys in it", maxKeys)
	}
	return keys, nil
}

// NewKey returns a fresh key as a line of a key file.
func NewKey() string {
	raw := make([]byte, keySize)
	rand.Read(raw) // it never fails: without randomness the process ends
	return base64.StdEncoding.EncodeToString(raw)
}

// First returns the id of the key that seals.
func (k *Keys) First() string {
	if k == nil {
		return ""
	}
	return k.first.id
}

// find returns the key of an id; a nil set has none.
func (k *Keys) find(id string) (*key, bool) {
	if k == nil {
		return nil, false
	}
	one, ok := k.byID[id]
	return one, ok
}

func derive(secret []byte) (*key, error) {
	part := func(label string, size int) ([]byte, error) {
		out, err := hkdf.Key(sha256.New, secret, nil, "gpuaas.mesh/workload-secrets/"+label, size)
		if err != nil {
			return nil, fmt.Errorf("derive %s: %w", label, err)
		}
		return out, nil
	}
	id, err := part("id", idSize)
	if err != nil {
		return nil, err
	}
	sealing, err := part("seal", keySize)
	if err != nil {
		return nil, err
	}
	digest, err := part("digest", keySize)
	if err != nil {
		return nil, err
	}
	block, err := aes.NewCipher(sealing)
	if err != nil {
		return nil, fmt.Errorf("make cipher: %w", err)
	}
	aead, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		return nil, fmt.Errorf("make cipher: %w", err)
	}
	return &key{id: hex.EncodeToString(id), aead: aead, digest: digest}, nil
}
