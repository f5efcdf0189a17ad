package joinstate

import "sync/atomic"

// Ring is a key set that may be replaced while it is used. The zero value has none and must be given one first. Safe for concurrent use.
type Ring struct {
	current atomic.Pointer[Keys]
	guard   atomic.Pointer[func() error]
}

// Replace puts another key set in force.
func (r *Ring) Replace(keys *Keys) { r.current.Store(keys) }

// Guard makes confirmed be asked before each signature; its error is the refusal.
func (r *Ring) Guard(confirmed func() error) { r.guard.Store(&confirmed) }

// SigningID returns the name of the key that signs now.
func (r *Ring) SigningID() string { return r.current.Load().SigningID() }

// SignWith is SignWith of the present keys.
func (r *Ring) SignWith(keyID string, s State) ([]byte, error) {
	if confirmed := r.guard.Load(); confirmed != nil {
		if err := (*confirmed)(); err != nil {
			return nil, err
		}
	}
	return r.current.Load().SignWith(keyID, s)
}

// Verify is Verify of the present keys.
func (r *Ring) Verify(signed []byte) (State, error) { return r.current.Load().Verify(signed) }
