// Package clock owns the agent's estimate of the true time.
//
// It uses the control plane's time once it has received it, extrapolated with the host's monotonic clock; the host's
// wall clock is used only until then. So a jump of the host's wall clock does not change how the agent judges
// certificates. It decides nothing itself: leases, expiry and fences are the database's.
//
// The wall clock is read in one place, Wall. A drill offsets it, see package wallclock.
package clock

import (
	"sync"
	"time"
)

// maxRoundTrip is the longest round trip of a reply whose time is used: half of it is the error.
const maxRoundTrip = 10 * time.Second

// Clock estimates the server's time. It is safe for concurrent use.
type Clock struct {
	shift func() time.Duration
	start time.Time // carries the monotonic reading

	mu     sync.Mutex
	heard  bool
	server time.Time     // the server's time when it was received
	at     time.Time     // when it was received, by the monotonic clock
	trip   time.Duration // round trip of the reading in use
}

// New returns a Clock whose wall reading is shifted by offset.
func New(offset time.Duration) *Clock { return Shifted(func() time.Duration { return offset }) }

// Shifted returns a Clock each of whose wall readings is shifted by what shift returns then.
func Shifted(shift func() time.Duration) *Clock { return &Clock{shift: shift, start: time.Now()} }

// Wall returns the time of the host's wall clock, shifted by the drill's offset if there is one.
func (c *Clock) Wall() time.Time {
	return time.Now().Round(0).Add(c.shift())
}

// Elapsed returns the time since the clock was made, which changes of the wall clock do not affect.
func (c *Clock) Elapsed() time.Duration { return time.Since(c.start) }

// Observe takes a server's time from a reply that has just arrived, to a request that was sent at sent. A reading with
// a shorter round trip, or one that is newer by a minute, replaces the one in use; the server's time is taken to be
// that of the middle of the round trip.
func (c *Clock) Observe(server, sent time.Time) {
	if server.IsZero() {
		return
	}
	now := time.Now()
	trip := now.Sub(sent)
	if trip < 0 || trip > maxRoundTrip {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.heard && trip > c.trip && now.Sub(c.at) < time.Minute {
		return
	}
	c.heard, c.server, c.at, c.trip = true, server.Add(trip/2), now, trip
}

// Now returns the best estimate of the true time: the server's, extrapolated by the monotonic clock, else the wall
// clock's.
func (c *Clock) Now() time.Time {
	if t, ok := c.Server(); ok {
		return t
	}
	return c.Wall()
}

// Server returns the server's time, extrapolated; false if no server's time was received yet.
func (c *Clock) Server() (time.Time, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.heard {
		return time.Time{}, false
	}
	return c.server.Add(time.Since(c.at)), true
}

// Skew returns how far the host's wall clock is ahead of the server's; false if no server's time was received yet.
func (c *Clock) Skew() (time.Duration, bool) {
	server, ok := c.Server()
	if !ok {
		return 0, false
	}
	return c.Wall().Sub(server), true
}
