package attempts

import "time"

// MayReportMissing reports whether the host may report to enrolment that it has no recovery token to send: at most once
// an hour, unless a session was admitted since.
func (g *Governor) MayReportMissing() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.rec.MissingReportedAt.IsZero() || g.cfg.Elapsed()-g.missingReported >= window
}

// NoteMissingReported records that it was reported to enrolment now.
func (g *Governor) NoteMissingReported() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.missingReported = g.cfg.Elapsed()
	return g.changeLocked(func(r *record) { r.MissingReportedAt = g.cfg.Wall() })
}

// openMissing reads when it was reported last; a time in the future, as after the clock was set back, counts as now.
func (g *Governor) openMissing(now time.Duration, wall time.Time) {
	if at := g.rec.MissingReportedAt; !at.IsZero() {
		g.missingReported = now - max(wall.Sub(at), 0)
	}
}
