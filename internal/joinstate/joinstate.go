package joinstate

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
)

// domain begins every signed byte string. The zero byte ends it, so that no domain is a prefix of another.
const domain = "gpuaas.mesh/join-state\x00"

const (
	version   = 1
	maxString = 256
	// keyIDSize is the length of a key's name, in characters.
	keyIDSize = 16
)

// State is what the control plane signed for a node.
type State struct {
	NodeID         string
	NodeInstanceID string
	Generation     int64
	Serial         string // of the certificate the session was opened for
	Era            int64
}

// Keys are the signing key and every key whose states are still accepted.
type Keys struct {
	signing   ed25519.PrivateKey
	signingID string
	privates  map[string]ed25519.PrivateKey
	verify    map[string]ed25519.PublicKey
}

// LoadOrCreateKeys reads the keys of a directory, of which the file that sorts last signs. An empty directory gets its
// first key. It is for callers that make or check a directory without the set of keys that package keyset keeps;
// recovery takes the key that signs from that set.
func LoadOrCreateKeys(dir string) (*Keys, error) {
	var keys *Keys
	err := pki.WithLock(filepath.Join(dir, ".lock"), func() error {
		files, err := keyFiles(dir)
		if err != nil {
			return err
		}
		if len(files) == 0 {
			if err := addKey(dir, 1); err != nil {
				return err
			}
			if files, err = keyFiles(dir); err != nil {
				return err
			}
		}
		keys, err = loadKeys(files)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("load join state keys: %w", err)
	}
	return keys, nil
}

func keyFiles(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir) // sorted by name
	if err != nil {
		return nil, fmt.Errorf("list keys: %w", err)
	}
	var files []string
	for _, entry := range entries {
		if strings.HasSuffix(entry.Name(), ".pem") && !strings.HasPrefix(entry.Name(), ".") {
			files = append(files, filepath.Join(dir, entry.Name()))
		}
	}
	return files, nil
}

func addKey(dir string, n int) error {
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return fmt.Errorf("make key: %w", err)
	}
	encoded, err := pki.EncodeKey(private)
	if err != nil {
		return err
	}
	return pki.WriteFile(filepath.Join(dir, fmt.Sprintf("join-%06d.pem", n)), encoded)
}

func loadKeys(files []string) (*Keys, error) {
	privates := make([]ed25519.PrivateKey, 0, len(files))
	for _, file := range files {
		private, err := pki.LoadSigningKey(file)
		if err != nil {
			return nil, err
		}
		privates = append(privates, private)
	}
	return NewKeys(privates...)
}

// NewKeys returns a key set of which the last key signs.
func NewKeys(privates ...ed25519.PrivateKey) (*Keys, error) {
	if len(privates) == 0 {
		return nil, errors.New("make join state keys: none given")
	}
	keys := &Keys{verify: map[string]ed25519.PublicKey{}, privates: map[string]ed25519.PrivateKey{}}
	for _, private := range privates {
		public, _ := private.Public().(ed25519.PublicKey)
		keys.signing, keys.signingID = private, pki.KeyID(public)
		keys.verify[keys.signingID], keys.privates[keys.signingID] = public, private
	}
	return keys, nil
}

// NewKeysOf returns a key set of which signing signs; verify are the keys whose states are accepted.
func NewKeysOf(signing ed25519.PrivateKey, privates map[string]ed25519.PrivateKey, verify *pki.KeySet) *Keys {
	public, _ := signing.Public().(ed25519.PublicKey)
	keys := &Keys{
		signing: signing, signingID: pki.KeyID(public), privates: privates,
		verify: map[string]ed25519.PublicKey{},
	}
	for _, id := range verify.IDs() {
		keys.verify[id], _ = verify.Key(id)
	}
	return keys
}

// SigningID returns the name of the key that signs.
func (k *Keys) SigningID() string { return k.signingID }

// SignWith returns the byte string for a state, signed by the key of that name; if this set lacks that key, by the one
// that signs.
func (k *Keys) SignWith(keyID string, s State) ([]byte, error) {
	private, ok := k.privates[keyID]
	if !ok {
		private, keyID = k.signing, k.signingID
	}
	body, err := encode(s, keyID)
	if err != nil {
		return nil, err
	}
	return append(body, ed25519.Sign(private, message(body))...), nil
}

// Sign returns the one byte string for a state: what the agent stores and presents.
func (k *Keys) Sign(s State) ([]byte, error) { return k.SignWith(k.signingID, s) }

// Verify returns the state of a byte string that one of the keys has signed. A state of a key that is not in the set is
// fault signing_key_unknown: our replicas differ, and the node is not to blame. Any other error is fault
// join_state_lost: an unreadable state and a badly signed one are treated alike.
func (k *Keys) Verify(signed []byte) (State, error) {
	state, keyID, body, err := split(signed)
	if err != nil {
		return State{}, lost(err)
	}
	public, ok := k.verify[keyID]
	if !ok {
		return State{}, fault.New(commonv1.Reason_REASON_SIGNING_KEY_UNKNOWN, "",
			fault.Cause(fmt.Errorf("verify join state: key %s is not in the set", keyID)))
	}
	if !k.isOf(keyID, public, message(body), signed[len(body):]) {
		return State{}, lost(errors.New("the signature does not verify"))
	}
	return state, nil
}

// isOf reports whether a signature of a message is of a key. Where the private key is known, the message is signed
// again and the signatures are compared: Ed25519 makes one signature of a message, and that costs less than half of a
// verification. The comparison takes the same time wherever they differ, so that no signature can be guessed by it.
func (k *Keys) isOf(keyID string, public ed25519.PublicKey, message, signature []byte) bool {
	if private, ok := k.privates[keyID]; ok && public.Equal(private.Public()) &&
		subtle.ConstantTimeCompare(ed25519.Sign(private, message), signature) == 1 {
		return true
	}
	return ed25519.Verify(public, message, signature)
}

// Peek reads a state without verifying it. It is for the agent, which has no key and stores only larger numbers; a
// caller must not decide about an identity by its result.
func Peek(signed []byte) (State, error) {
	state, _, _, err := split(signed)
	return state, err
}

// KeyID returns the name of the key that a state claims to be signed with, without verifying it.
func KeyID(signed []byte) (string, error) {
	_, keyID, _, err := split(signed)
	return keyID, err
}

func lost(cause error) error {
	return fault.New(commonv1.Reason_REASON_JOIN_STATE_LOST, "", fault.Cause(cause))
}

func message(body []byte) []byte {
	out := make([]byte, 0, len(domain)+len(body))
	return append(append(out, domain...), body...)
}

// The encoding, all integers big-endian: version 1 byte; key id, node id, instance id, serial (each: length 2 bytes,
// bytes); generation and era (8 bytes each); then the signature, 64 bytes.

func encode(s State, keyID string) ([]byte, error) {
	if s.NodeID == "" || s.NodeInstanceID == "" || s.Serial == "" || s.Generation < 1 || s.Era < 0 {
		return nil, errors.New("encode join state: incomplete")
	}
	out := []byte{version}
	for _, text := range []string{keyID, s.NodeID, s.NodeInstanceID, s.Serial} {
		if len(text) > maxString {
			return nil, errors.New("encode join state: an id is too long")
		}
		out = binary.BigEndian.AppendUint16(out, uint16(len(text))) // bounded above.
		out = append(out, text...)
	}
	out = binary.BigEndian.AppendUint64(out, uint64(s.Generation)) // not negative.
	return binary.BigEndian.AppendUint64(out, uint64(s.Era)), nil  // not negative.
}

func split(signed []byte) (State, string, []byte, error) {
	if len(signed) <= ed25519.SignatureSize || len(signed) > 4*maxString+64+ed25519.SignatureSize {
		return State{}, "", nil, errors.New("decode join state: bad length")
	}
	body := signed[:len(signed)-ed25519.SignatureSize]
	if body[0] != version {
		return State{}, "", nil, fmt.Errorf("decode join state: version %d", body[0])
	}
	rest := body[1:]
	var texts [4]string
	for i := range texts {
		if len(rest) < 2 {
			return State{}, "", nil, errors.New("decode join state: truncated")
		}
		n := int(binary.BigEndian.Uint16(rest))
		if rest = rest[2:]; n > len(rest) || n > maxString {
			return State{}, "", nil, errors.New("decode join state: truncated")
		}
		texts[i], rest = string(rest[:n]), rest[n:]
	}
	if len(rest) != 16 {
		return State{}, "", nil, errors.New("decode join state: bad length")
	}
	state := State{
		NodeID: texts[1], NodeInstanceID: texts[2], Serial: texts[3],
		Generation: int64(binary.BigEndian.Uint64(rest[:8])), // checked below.
		Era:        int64(binary.BigEndian.Uint64(rest[8:])), // checked below.
	}
	// A state is accepted only if it encodes to the same bytes: one with negative numbers or missing ids does not.
	again, err := encode(state, texts[0])
	if err != nil || !bytes.Equal(again, body) || len(texts[0]) != keyIDSize {
		return State{}, "", nil, errors.New("decode join state: not in canonical form")
	}
	return state, texts[0], body, nil
}
