package envelope

import "sync/atomic"

// Ring is the key that signs tasks and the keys that verify them, which may be replaced while they are used. Safe for concurrent use.
type Ring struct{ current atomic.Pointer[ringState] }

type ringState struct {
	key       Key
	verifiers *VerifierSet
}

// NewRing makes a ring. verifiers nil means the key alone.
func NewRing(key Key, verifiers *VerifierSet) *Ring {
	if verifiers == nil {
		verifiers, _ = NewVerifierSet(key.Public()) // fails for the zero Key alone, whose holder signs nothing
	}
	r := &Ring{}
	r.Replace(key, verifiers)
	return r
}

// Replace puts another key and other verifiers in force.
func (r *Ring) Replace(key Key, verifiers *VerifierSet) {
	r.current.Store(&ringState{key: key, verifiers: verifiers})
}

// Key returns the key that signs now.
func (r *Ring) Key() Key { return r.current.Load().key }

// Verifiers returns the keys that verify now.
func (r *Ring) Verifiers() *VerifierSet { return r.current.Load().verifiers }
