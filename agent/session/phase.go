package session

import (
	"fmt"
	"sync"
	"time"
)

// phase is a part of an opening that has a timeout of its own: the kernel of a stopped replica still accepts
// connections, and the client takes another replica at the first phase that times out.
type phase string

const (
	phaseConnect   phase = "connection"
	phaseHandshake phase = "TLS handshake"
	phaseWelcome   phase = "Welcome"
	phaseAdmission phase = "Admitted"
)

// phaseError means that a phase of an opening timed out, and has the address.
type phaseError struct {
	phase   phase
	address string
	within  time.Duration
}

func (e *phaseError) Error() string {
	return fmt.Sprintf("no %s from %s within %s", e.phase, e.address, e.within)
}

// quickRound is how many opens that timed out are followed by another at once where there are fewer addresses than
// that: there may be many replicas behind one address.
const quickRound = 3

// phases keeps the timeouts of one opening. It is safe for concurrent use: grpc connects and does the handshake in a
// goroutine of its own.
type phases struct {
	limit  func(phase) time.Duration
	expire func(error) // called once, with the phase that took too long

	mu      sync.Mutex
	timer   *time.Timer
	current phase
	address string
	turn    int // counts timer starts, so that an earlier timer that fires late is ignored
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

// connected notes the address of the connection and begins the handshake's phase.
func (p *phases) connected(address string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.current, p.address = phaseHandshake, address
	p.restartLocked()
}

// heard starts the time of the present phase again, after a frame of the server: it lives and works on this opening.
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

// end stops the time for good and returns the error of the phase that timed out before; nil if none did.
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
