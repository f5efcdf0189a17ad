package skew

import (
	"cmp"
	"time"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/pki"
)

const (
	// Tolerance is the difference between a host's clock and the database's from which it is reported by default.
	// Certificates are dated back by as much: a host that is further behind takes a fresh one for not valid yet.
	Tolerance = pki.Backdate
	// leastChange is by how much a reported difference must change to be reported again, and a quarter of it at least.
	leastChange = time.Minute
	// A session may report atOnce changes of its clock one after another, and after them one in each pause.
	atOnce = 4
	pause  = time.Minute
)

// Meter measures how far the clock of an agent's host is ahead of the database's, by the heartbeats of one session.
//
// When a heartbeat was sent is known within bounds: not after it arrived, and not before the heartbeat before it was
// sent, or Welcome, plus what the agent's monotonic clock has advanced since. Only the difference that is left at
// either bound is counted, so that neither a slow network, nor a replica that stood still, nor a step of the replica's
// own clock makes a clock seem wrong.
type Meter struct {
	tolerance time.Duration // from which a difference is reported; below half of it the clock counts as right again

	floor time.Time     // by the database's clock: the last heartbeat was not sent before; zero: not known
	mono  time.Duration // the agent's monotonic clock in that heartbeat
	read  bool          // there was a heartbeat

	reported time.Duration // as last reported; zero: the clock is right
	// freeAt is when atOnce reports may follow each other again, by the replica's monotonic clock.
	freeAt time.Time
}

// Begin notes that Welcome is about to be sent, and the difference from which the clock is reported; zero: Tolerance.
func (m *Meter) Begin(clock *Clock, tolerance time.Duration) {
	m.tolerance = tolerance
	if clock.Known() {
		m.floor, _ = clock.Span()
	}
}

// Heartbeat takes the clocks of a heartbeat that arrived at the given time of the database at the latest, which
// is now at the replica. It returns the difference to report, and whether there is one; zero: the clock is right again.
func (m *Meter) Heartbeat(f *nodev1.Heartbeat, arrived, now time.Time) (time.Duration, bool) {
	if m.floor.IsZero() || f.GetWallClock().CheckValid() != nil {
		return 0, false
	}
	mono := f.GetMonotonic().AsDuration()
	if m.read && mono > m.mono {
		m.floor = m.floor.Add(mono - m.mono)
	}
	m.read, m.mono = true, mono
	if m.floor.After(arrived) {
		m.floor = arrived
	}
	offset := time.Duration(0)
	wall := f.GetWallClock().AsTime()
	if ahead := wall.Sub(arrived); ahead > 0 {
		offset = ahead
	} else if behind := wall.Sub(m.floor); behind < 0 {
		offset = behind
	}
	limit := cmp.Or(m.tolerance, Tolerance)
	if m.reported != 0 {
		limit /= 2
	}
	if offset.Abs() <= limit {
		offset = 0
	}
	moved := (offset - m.reported).Abs()
	switch {
	case offset == m.reported, m.freeAt.Sub(now) > (atOnce-1)*pause,
		offset != 0 && m.reported != 0 && moved <= max(leastChange, m.reported.Abs()/4):
		return 0, false
	}
	m.reported = offset
	if m.freeAt.Before(now) {
		m.freeAt = now
	}
	m.freeAt = m.freeAt.Add(pause)
	return offset, true
}
