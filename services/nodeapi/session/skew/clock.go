package skew

import (
	"sync"
	"time"

	"github.com/gpuaas/mesh/internal/wallclock"
)

// Clock is the database's clock as measured by this replica. Agents' clocks, certificates and expiry are compared with
// it, never with this host's clock alone. The zero value is the host's clock until the first reading. Safe for
// concurrent use.
type Clock struct {
	mu     sync.Mutex
	wall   offset // from the host's wall clock
	steady offset // from a clock that began with the host's and goes on by the monotonic clock
}

// started is where steady begins.
var started = wallclock.Now()

// instant is one moment by both clocks of the host.
type instant struct{ wall, steady time.Time }

func instantOf(t time.Time) instant {
	return instant{wall: t.Round(0), steady: started.Round(0).Add(t.Sub(started))}
}

// offset is what readings show of the server's clock minus another.
type offset struct {
	by     time.Duration
	within time.Duration // how long the reading took, which bounds the error
	read   bool
}

// set takes a reading whose times are of the other clock, and which took as long as within. A slower reading than the
// present one moves the offset only as far as the two readings contradict each other.
func (o *offset) set(sent, server time.Time, within time.Duration) {
	most := server.Sub(sent)
	least := most - within
	switch {
	case !o.read || within <= o.within:
		o.by, o.within, o.read = least+within/2, within, true
	case o.by < least:
		o.by, o.within = least, within
	case o.by > most:
		o.by, o.within = most, within
	}
}

// Set takes a reading: the server's time, which lies between sent and received. A zero time is ignored.
func (c *Clock) Set(sent, received, server time.Time) {
	c.set(instantOf(sent), server, max(received.Sub(sent), 0))
}

func (c *Clock) set(sent instant, server time.Time, within time.Duration) {
	if server.Unix() <= 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wall.set(sent.wall, server, within)
	c.steady.set(sent.steady, server, within)
}

// Offset returns the database's clock minus the host's.
func (c *Clock) Offset() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.wall.by
}

// Known reports whether there was a reading: until then Now is the host's time.
func (c *Clock) Known() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.wall.read
}

// Span returns two times between which the database's is. They differ from a step of the host's wall clock, or a sleep
// of the host, which the monotonic clock does not count, to the next reading.
func (c *Clock) Span() (time.Time, time.Time) { return c.span(instantOf(wallclock.Now())) }

func (c *Clock) span(now instant) (time.Time, time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	first, last := now.wall.Add(c.wall.by), now.wall.Add(c.wall.by)
	if steady := now.steady.Add(c.steady.by); c.steady.read && steady.Before(first) {
		first = steady
	} else if c.steady.read {
		last = steady
	}
	return first, last
}

// Now returns the database's time.
func (c *Clock) Now() time.Time { return wallclock.Now().Add(c.Offset()) }
