package joinstate

import "sync/atomic"

// Ring is a key set that may be replaced while it is used. The zero value has none, and Replace must be called first.
// Safe for concurrent use.
type Ring struct {
	current atomic.Pointer[Keys]
	guard   atomic.Pointer[func() error]
}

// Replace replaces the key set.
func (r *Ring) Replace(keys *Keys) { r.current.Store(keys) }

// Guard has SignWith call confirmed before each signature; if confirmed returns an error, SignWith signs nothing and
// returns it.
func (r *Ring) Guard(confirmed func() error) { r.guard.Store(&confirmed) }

// SigningID returns the name of the key that signs now.
func (r *Ring) SigningID() string { return r.current.Load().SigningID() }

// SignWith calls SignWith of the present keys.
func (r *Ring) SignWith(keyID string, s State) ([]byte, error) {
	if confirmed := r.guard.Load(); confirmed != nil {
		if err := (*confirmed)(); err != nil {
			return nil, err
		}
	}
	return r.current.Load().SignWith(keyID, s)
}

// Verify calls Verify of the present keys.
func (r *Ring) Verify(signed []byte) (State, error) { return r.current.Load().Verify(signed) }
