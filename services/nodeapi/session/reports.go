package session

import (
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/services/nodeapi/roster"
)

// A session reports diagnosticReports of the diagnostics that its agent sends at once, and then one in diagnosticPause.
const (
	diagnosticReports = 8
	diagnosticPause   = 5 * time.Second
)

// A session has observationsAtOnce observations taken at once, and then one in observationPause. An agent sends those
// that have changed, and all of its node each minute.
const (
	observationsAtOnce = 512
	observationPause   = 50 * time.Millisecond
)

// spending counts the events of one kind of one session.
type spending struct {
	freeAt time.Time // when none counts any more, by the replica's monotonic clock
}

// spend counts an event, and returns false instead if most of them were there at once; one is forgotten per pause.
func (s *spending) spend(now time.Time, most int, pause time.Duration) bool {
	if s.freeAt.Sub(now) > time.Duration(most-1)*pause {
		return false
	}
	if s.freeAt.Before(now) {
		s.freeAt = now
	}
	s.freeAt = s.freeAt.Add(pause)
	return true
}

// diagnosed bounds how often the diagnostics that an agent sends are reported. What comes while the reports are used up
// waits, as many as an event has and the newest, for the next frame or heartbeat that may report, or for the session's
// end.
type diagnosed struct {
	spent   spending
	waiting []*commonv1.Diagnostic
}

// take takes diagnostics, none for a heartbeat. It returns those to report now.
func (d *diagnosed) take(list []*commonv1.Diagnostic, now time.Time) []*commonv1.Diagnostic {
	if len(list) > 0 {
		d.waiting, _ = roster.MergeDiagnostics(d.waiting, list)
	}
	if len(d.waiting) == 0 || !d.spent.spend(now, diagnosticReports, diagnosticPause) {
		return nil
	}
	return d.takeWaiting()
}

// takeWaiting returns what waits, which then waits no longer.
func (d *diagnosed) takeWaiting() []*commonv1.Diagnostic {
	out := d.waiting
	d.waiting = nil
	return out
}

// diagnose reports diagnostics, if there are any.
func (h *handler) diagnose(list []*commonv1.Diagnostic) {
	if len(list) > 0 {
		h.server.deps.Diagnose(h.sess, list)
	}
}

// observed takes an observation, or drops one that is above the bound. Each that is taken may become a row and an
// event, and the agent chooses the workspaces that it names. A working agent sends again what was dropped; where it
// does not, as for a workspace that is gone, what is written becomes stale.
func (h *handler) observed(o *nodev1.Observation, now time.Time) {
	if h.observations.spend(now, observationsAtOnce, observationPause) {
		h.server.deps.Observe(h.sess, o)
		return
	}
	h.server.deps.Metrics.Frame("observation_dropped")
}
