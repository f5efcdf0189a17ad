// Package clock owns the agent's idea of time.
//
// It believes the control plane's time once it has heard it, and counts on from there with the host's monotonic clock; the host's wall clock is
// evidence only, used until then. So a host whose wall clock jumps does not judge certificates by the jump. It decides nothing itself: leases,
// expiry and fences are the database's.
//
// The wall clock is read in one place, Wall, which a drill can offset with GPUAAS_CLOCK_OFFSET (a Go duration) in builds that are no releases.
package clock

import (
	"sync"
	"time"
)

// maxRoundTrip is the slowest answer whose time is believed: half of it is the error.
const maxRoundTrip = 10 * time.Second

// Clock is safe for concurrent use.
type Clock struct {
	offset time.Duration
	start  time.Time // carries the monotonic reading

	mu     sync.Mutex
	heard  bool
	server time.Time     // the server's time when it was heard
	at     time.Time     // the monotonic moment of it
	trip   time.Duration // round trip of the reading in use
}

// New makes a clock whose wall reading is shifted by offset.
func New(offset time.Duration) *Clock {
	return &Clock{offset: offset, start: time.Now()}
}

// Wall is the host's wall clock, shifted by the drill's offset if there is one.
func (c *Clock) Wall() time.Time {
	return time.Now().Round(0).Add(c.offset)
}

// Elapsed is the time since the clock was made, unmoved by any change of the wall clock.
func (c *Clock) Elapsed() time.Duration { return time.Since(c.start) }

// Observe takes a server's time that was asked for at sent and has just arrived. A reading with a shorter round trip, or one that is newer by a
// minute, replaces the one in use; the server's time is taken for the middle of the round trip.
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

// Now is the best idea of the true time: the server's, counted on by the monotonic clock, else the wall clock.
func (c *Clock) Now() time.Time {
	if t, ok := c.Server(); ok {
		return t
	}
	return c.Wall()
}

// Server is the server's time counted on, if it has been heard.
func (c *Clock) Server() (time.Time, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.heard {
		return time.Time{}, false
	}
	return c.server.Add(time.Since(c.at)), true
}

// Skew is how far the host's wall clock is ahead of the server's, if that has been heard.
func (c *Clock) Skew() (time.Duration, bool) {
	server, ok := c.Server()
	if !ok {
		return 0, false
	}
	return c.Wall().Sub(server), true
}
