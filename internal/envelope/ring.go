package envelope

import (
	"crypto/ed25519"
	"fmt"
	"sync/atomic"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// Ring is the key that signs tasks and the keys that verify them, which may be replaced while they are used. Safe for
// concurrent use.
type Ring struct{ current atomic.Pointer[RingState] }

// RingState holds the keys with which a Ring signs and verifies.
type RingState struct {
	Signing   Key
	Former    map[string]ed25519.PrivateKey // by id: keys that have signed tasks which may be offered again
	Verifiers *VerifierSet                  // nil: Signing alone
	// Confirmed returns an error if nothing may be signed now. A nil function means that signing is always allowed.
	Confirmed func() error
}

// NewRing returns a ring. If verifiers is nil, only the key itself verifies.
func NewRing(key Key, verifiers *VerifierSet) *Ring {
	r := &Ring{}
	r.Replace(RingState{Signing: key, Verifiers: verifiers})
	return r
}

// Replace replaces the keys of the ring.
func (r *Ring) Replace(state RingState) {
	if state.Verifiers == nil {
		// fails only for the zero Key, with which nothing is signed
		state.Verifiers, _ = NewVerifierSet(state.Signing.Public())
	}
	r.current.Store(&state)
}

// Signer returns the key that signs now, or an error if none may sign.
func (r *Ring) Signer() (Key, error) {
	state := r.current.Load()
	if state.Confirmed != nil {
		if err := state.Confirmed(); err != nil {
			return Key{}, err
		}
	}
	return state.Signing, nil
}

// SignerOf returns the key with an id: the one that signs now, or one that has signed and is not retired. It fails with
// fault signing_key_unknown.
func (r *Ring) SignerOf(keyID string) (Key, error) {
	state := r.current.Load()
	if state.Signing.ID() == keyID {
		return state.Signing, nil
	}
	if private, ok := state.Former[keyID]; ok {
		return NewKey(private), nil
	}
	return Key{}, fault.New(commonv1.Reason_REASON_SIGNING_KEY_UNKNOWN,
		fmt.Sprintf("this replica has no key %s of tasks", keyID))
}

// Verifiers returns the keys that verify now.
func (r *Ring) Verifiers() *VerifierSet { return r.current.Load().Verifiers }
