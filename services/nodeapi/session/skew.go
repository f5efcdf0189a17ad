package session

import (
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/pki"
)

const (
	// skewFrom is the difference between a host's clock and the database's from which it is reported. Certificates are
	// dated back by as much: a host that is further behind takes a fresh one for not valid yet.
	skewFrom = pki.Backdate
	// skewUntil is the difference below which the clock counts as right again.
	skewUntil = skewFrom / 2
	// skewMoves is by how much a reported difference must change to be reported again, and a quarter of it at least.
	skewMoves = time.Minute
	// A session reports skewReports changes of its clock at once, and then one in skewPause.
	skewReports = 4
	skewPause   = time.Minute
)

// skew measures how far the clock of an agent's host is ahead of the database's, by the heartbeats of one session.
//
// When a heartbeat was sent is known within bounds: not after it arrived, and not before the heartbeat before it was
// sent, or Welcome, plus what the agent's monotonic clock has advanced since. Only the difference that is left at
// either bound is counted, so that neither a slow network, nor a replica that stood still, nor a step of the replica's
// own clock makes a clock seem wrong.
type skew struct {
	floor time.Time     // by the database's clock: the last heartbeat was not sent before; zero: not known
	mono  time.Duration // the agent's monotonic clock in that heartbeat
	read  bool          // there was a heartbeat

	told time.Duration // as last reported; zero: the clock is right
	// freeAt is when all of skewReports may be used again, by the replica's monotonic clock.
	freeAt time.Time
}

// begin notes that Welcome is about to be sent.
func (s *skew) begin(clock *Clock) {
	if clock.Known() {
		s.floor, _ = clock.Span()
	}
}

// heartbeat takes the clocks of a heartbeat that arrived at the given time of the database at the latest, which
// is now at the replica. It returns the difference to report, and whether there is one; zero: the clock is right again.
func (s *skew) heartbeat(f *nodev1.Heartbeat, arrived, now time.Time) (time.Duration, bool) {
	if s.floor.IsZero() || f.GetWallClock().CheckValid() != nil {
		return 0, false
	}
	mono := f.GetMonotonic().AsDuration()
	if s.read && mono > s.mono {
		s.floor = s.floor.Add(mono - s.mono)
	}
	s.read, s.mono = true, mono
	if s.floor.After(arrived) {
		s.floor = arrived
	}
	offset := time.Duration(0)
	wall := f.GetWallClock().AsTime()
	if ahead := wall.Sub(arrived); ahead > 0 {
		offset = ahead
	} else if behind := wall.Sub(s.floor); behind < 0 {
		offset = behind
	}
	limit := skewFrom
	if s.told != 0 {
		limit = skewUntil
	}
	if offset.Abs() <= limit {
		offset = 0
	}
	moved := (offset - s.told).Abs()
	switch {
	case offset == s.told, s.freeAt.Sub(now) > (skewReports-1)*skewPause,
		offset != 0 && s.told != 0 && moved <= max(skewMoves, s.told.Abs()/4):
		return 0, false
	}
	s.told = offset
	if s.freeAt.Before(now) {
		s.freeAt = now
	}
	s.freeAt = s.freeAt.Add(skewPause)
	return offset, true
}

// clocked takes the clocks of a heartbeat and reports how far the host's is off when that changes. Before the session
// is admitted it is only noted, for the report of the admission.
func (h *handler) clocked(f *nodev1.Heartbeat, now time.Time) {
	_, arrived := h.server.cfg.Clock.Span()
	offset, changed := h.clock.heartbeat(f, arrived, now)
	switch {
	case !changed:
	case h.sess.State() == commonv1.SessionState_SESSION_STATE_ADMITTED:
		h.server.deps.Clock(h.sess, offset)
	default:
		h.sess.SetClock(offset)
	}
}
