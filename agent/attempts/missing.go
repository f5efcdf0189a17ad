package attempts

import (
	"slices"
	"time"
)

// BeginMissing counts an attempt to tell enrolment that the host has no recovery token to send, and reports whether it
// may be made: once an hour after enrolment has taken note of one, unless a session was admitted since, and until then
// as often in an hour as an attempt to recover, which it does not count as. After an error the count holds in memory: a
// host whose disk is full is to be known of.
func (g *Governor) BeginMissing() (bool, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := g.cfg.Elapsed()
	if !g.rec.MissingReportedAt.IsZero() && now-g.missingReported < window || len(g.triesLocked()) >= g.limitLocked() {
		return false, nil
	}
	g.missingTries = append(g.missingTries, now)
	return true, g.changeLocked(func(*record) {})
}

// EndMissing records what such an attempt came to: whether enrolment has taken note, and otherwise whether the attempt
// counts against the hour.
func (g *Governor) EndMissing(noted, counts bool) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if noted {
		g.missingTries, g.missingReported = nil, g.cfg.Elapsed()
		return g.changeLocked(func(r *record) { r.MissingReportedAt = g.cfg.Wall() })
	}
	if !counts && len(g.missingTries) > 0 {
		g.missingTries = g.missingTries[:len(g.missingTries)-1]
	}
	return g.changeLocked(func(*record) {})
}

// triesLocked returns when the attempts of the last hour to tell enrolment were made.
func (g *Governor) triesLocked() []time.Duration {
	now := g.cfg.Elapsed()
	g.missingTries = slices.DeleteFunc(g.missingTries, func(mark time.Duration) bool { return now-mark >= window })
	return g.missingTries
}

// openMissing reads when enrolment was told last, and when that was tried; a time in the future, as after the clock was
// set back, counts as now.
func (g *Governor) openMissing(now time.Duration, wall time.Time) {
	if at := g.rec.MissingReportedAt; !at.IsZero() {
		g.missingReported = now - max(wall.Sub(at), 0)
	}
	for _, at := range g.rec.MissingTried[max(len(g.rec.MissingTried)-mostPerHour, 0):] {
		g.missingTries = append(g.missingTries, now-max(wall.Sub(at), 0))
	}
}
