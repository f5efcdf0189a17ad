package attempts

import (
	"time"
)

// defaultDwell holds until a control plane has sent its policy.
const defaultDwell = 10 * time.Minute

// mostDwell bounds the dwell, whatever policy was sent.
const mostDwell = 24 * time.Hour

// SetTrustDwell keeps for how long the node API is untrusted before trust is asked of recovery. It writes only a
// change, or what could not be written before. Zero, as an earlier control plane sends it, keeps the last one.
func (g *Governor) SetTrustDwell(dwell time.Duration) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	seconds := int64(min(dwell, mostDwell) / time.Second)
	if dwell <= 0 || !g.unwritten && g.rec.TrustDwell == max(seconds, 1) {
		return nil
	}
	return g.changeLocked(func(r *record) { r.TrustDwell = max(seconds, 1) })
}

// TrustDwell returns the dwell of the last policy.
func (g *Governor) TrustDwell() time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.dwellLocked()
}

func (g *Governor) dwellLocked() time.Duration {
	if g.rec.TrustDwell <= 0 {
		return defaultDwell
	}
	return time.Duration(min(g.rec.TrustDwell, int64(mostDwell/time.Second))) * time.Second
}

// Untrusted is called each time that the node API is not verified by the trust that is held. It returns whether that
// has been so for the dwell. Its begin is on disk when Untrusted returns nil, and holds in memory otherwise.
func (g *Governor) Untrusted() (bool, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.rec.UntrustedSince.IsZero() {
		return false, g.dwellAnewLocked()
	}
	return g.cfg.Elapsed()-g.untrusted >= g.dwellLocked(), nil
}

// DwellAnew begins the dwell anew: an attempt to bootstrap trust has failed, and the next is a dwell away.
func (g *Governor) DwellAnew() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.dwellAnewLocked()
}

func (g *Governor) dwellAnewLocked() error {
	g.untrusted = g.cfg.Elapsed()
	return g.changeLocked(func(r *record) { r.UntrustedSince = g.cfg.Wall() })
}

// Trusted is called when the node API was verified: the dwell is over.
func (g *Governor) Trusted() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.rec.UntrustedSince.IsZero() {
		return nil
	}
	return g.changeLocked(func(r *record) { r.UntrustedSince = time.Time{} })
}
