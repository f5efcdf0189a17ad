package session

import (
	"fmt"
	"sync"
	"time"
)

// phase is a part of an opening that has a time of its own: a replica that was stopped still takes connections, and
// is left for another one at the first thing that it does not do.
type phase string

const (
	phaseConnect   phase = "connection"
	phaseHandshake phase = "TLS handshake"
	phaseWelcome   phase = "Welcome"
	phaseAdmission phase = "Admitted"
)

// phaseError says which phase of an opening took too long, and where.
type phaseError struct {
	phase   phase
	address string
	within  time.Duration
}

func (e *phaseError) Error() string {
	return fmt.Sprintf("no %s from %s within %s", e.phase, e.address, e.within)
}

// quickRound is how many opens that timed out are followed by another at once where there are fewer addresses than
// that: behind one address may stand many replicas.
const quickRound = 3

// limit is how long a phase may take in an open after so many that timed out. It doubles with every round, since what
// is slow everywhere is no paused replica but a crowd.
func (c *Client) limit(ph phase, timeouts int) time.Duration {
	limit := map[phase]time.Duration{
		phaseConnect: c.cfg.ConnectTimeout, phaseHandshake: c.cfg.HandshakeTimeout,
		phaseWelcome: c.cfg.WelcomeTimeout, phaseAdmission: c.cfg.AdmissionTimeout,
	}[ph]
	for range timeouts / c.route.round() {
		if limit >= c.cfg.OpenTimeout {
			break
		}
		limit *= 2
	}
	return min(limit, c.cfg.OpenTimeout)
}

// phases keeps the time of one opening. It is safe for concurrent use: grpc connects and shakes hands in a goroutine
// of its own.
type phases struct {
	limit  func(phase) time.Duration
	expire func(error) // called once, with the phase that took too long

	mu      sync.Mutex
	timer   *time.Timer
	current phase
	address string
	turn    int // of the timer; an earlier one that fires late means nothing
	over    bool
	err     error
}

// enter begins a phase, whose time starts now.
func (p *phases) enter(ph phase) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.current = ph
	p.restartLocked()
}

// connected notes the address that is opened with and begins the handshake.
func (p *phases) connected(address string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.current, p.address = phaseHandshake, address
	p.restartLocked()
}

// heard starts the time of the present phase again: the server lives and works on this opening.
func (p *phases) heard() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.restartLocked()
}

// pause stops the time until the next phase begins, for work on this side.
func (p *phases) pause() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stopLocked()
}

// end stops the time for good and returns the phase that had taken too long before, if one had.
func (p *phases) end() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stopLocked()
	p.over = true
	return p.err
}

func (p *phases) stopLocked() {
	p.turn++
	if p.timer != nil {
		p.timer.Stop()
	}
}

func (p *phases) restartLocked() {
	p.stopLocked()
	if p.over {
		return
	}
	turn, failed := p.turn, &phaseError{phase: p.current, address: p.address, within: p.limit(p.current)}
	p.timer = time.AfterFunc(failed.within, func() {
		p.mu.Lock()
		late := p.over || p.turn != turn
		if !late {
			p.over, p.err = true, failed
		}
		p.mu.Unlock()
		if !late {
			p.expire(failed)
		}
	})
}
