package session

import (
	"sync"
	"time"
)

// Clock is the database's clock as measured here: agents, certificates and expiry are judged by it, never by this host's alone. The zero value is the
// host's clock until the first reading. Safe for concurrent use.
type Clock struct {
	mu     sync.Mutex
	offset time.Duration
}

// Set takes a reading: the server's time, known to lie between sent and received. A zero reading is none.
func (c *Clock) Set(sent, received, server time.Time) {
	if server.Unix() <= 0 {
		return
	}
	middle := sent.Add(received.Sub(sent) / 2)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.offset = server.Sub(middle)
}

// Offset is what to add to the host's clock.
func (c *Clock) Offset() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.offset
}

// Now is the database's time.
func (c *Clock) Now() time.Time { return time.Now().Add(c.Offset()) }

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
