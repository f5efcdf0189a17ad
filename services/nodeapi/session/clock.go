package session

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
	offset time.Duration
	within time.Duration // how long the reading of the offset took, which bounds the offset's error
	read   bool
}

// Set takes a reading: the server's time, which lies between sent and received. A zero time is ignored. A slower
// reading than the present one moves the offset only as far as the two readings contradict each other.
func (c *Clock) Set(sent, received, server time.Time) {
	if server.Unix() <= 0 {
		return
	}
	within := max(received.Sub(sent), 0)
	most := server.Sub(sent)
	least := most - within
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case !c.read || within <= c.within:
		c.offset, c.within, c.read = least+within/2, within, true
	case c.offset < least:
		c.offset, c.within = least, within
	case c.offset > most:
		c.offset, c.within = most, within
	}
}

// Offset returns the database's clock minus the host's.
func (c *Clock) Offset() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.offset
}

// Known reports whether there was a reading: until then Now is the host's time.
func (c *Clock) Known() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.read
}

// Now returns the database's time.
func (c *Clock) Now() time.Time { return wallclock.Now().Add(c.Offset()) }

// profilePrint is the fingerprint of the profile that recovery holds for agents.
type profilePrint struct {
	mu          sync.Mutex
	fingerprint string
}

func (p *profilePrint) set(fingerprint string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fingerprint = fingerprint
}

func (p *profilePrint) get() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.fingerprint
}
