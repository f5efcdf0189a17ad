package attempts

import "time"

// MayTellMissing reports whether the host may tell enrolment that it has no recovery token to send: at most once an
// hour, unless a session was admitted since.
func (g *Governor) MayTellMissing() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.rec.MissingToldAt.IsZero() || g.cfg.Elapsed()-g.missingTold >= window
}

// ToldMissing records that enrolment was told so now.
func (g *Governor) ToldMissing() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.missingTold = g.cfg.Elapsed()
	return g.changeLocked(func(r *record) { r.MissingToldAt = g.cfg.Wall() })
}

// openMissing reads when enrolment was told last; a time in the future, as after the clock was set back, counts as now.
func (g *Governor) openMissing(now time.Duration, wall time.Time) {
	if at := g.rec.MissingToldAt; !at.IsZero() {
		g.missingTold = now - max(wall.Sub(at), 0)
	}
}
