package transport

import (
	"fmt"
	"sync"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// Phase is a part of an opening that has a timeout of its own: the kernel of a stopped replica still accepts
// connections, and the client takes another replica at the first phase that times out.
type Phase string

// The phases in their order. The text of a phase stands in diagnostics.
const (
	PhaseConnect   Phase = "connection"
	PhaseHandshake Phase = "TLS handshake"
	PhaseWelcome   Phase = "Welcome"
	PhaseAdmission Phase = "Admitted"
)

// PhaseError means that a phase of an opening timed out, and has the address.
type PhaseError struct {
	phase   Phase
	address string
	within  time.Duration
}

// Error returns the phase, the address and the time as text.
func (e *PhaseError) Error() string {
	return fmt.Sprintf("no %s from %s within %s", e.phase, e.address, e.within)
}

// DiagnosticCode returns the code under which the error is recorded.
func (*PhaseError) DiagnosticCode() commonv1.DiagnosticCode {
	return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CONNECTION_TIMED_OUT
}

// quickRound is how many opens that timed out are followed by another at once where there are fewer addresses than
// that: there may be many replicas behind one address.
const quickRound = 3

// Phases keeps the timeouts of one opening. It is safe for concurrent use: grpc connects and does the handshake in a
// goroutine of its own.
type Phases struct {
	Limit  func(Phase) time.Duration
	Expire func(error) // called once, with the phase that took too long

	mu      sync.Mutex
	timer   *time.Timer
	current Phase
	address string
	starts  int // counts timer starts, so that an earlier timer that fires late is ignored
	over    bool
	err     error
}

// Enter begins a phase, whose time starts now.
func (p *Phases) Enter(ph Phase) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.current = ph
	p.restartLocked()
}

// Connected notes the address of the connection and begins the handshake's phase.
func (p *Phases) Connected(address string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.current, p.address = PhaseHandshake, address
	p.restartLocked()
}

// Heard starts the time of the present phase again, after a frame of the server: it lives and works on this opening.
func (p *Phases) Heard() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.restartLocked()
}

// Pause stops the time until the next phase begins, for work on this side.
func (p *Phases) Pause() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stopLocked()
}

// End stops the time for good and returns the error of the phase that timed out before; nil if none did.
func (p *Phases) End() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stopLocked()
	p.over = true
	return p.err
}

func (p *Phases) stopLocked() {
	p.starts++
	if p.timer != nil {
		p.timer.Stop()
	}
}

func (p *Phases) restartLocked() {
	p.stopLocked()
	if p.over {
		return
	}
	starts, failed := p.starts, &PhaseError{phase: p.current, address: p.address, within: p.Limit(p.current)}
	p.timer = time.AfterFunc(failed.within, func() {
		p.mu.Lock()
		late := p.over || p.starts != starts
		if !late {
			p.over, p.err = true, failed
		}
		p.mu.Unlock()
		if !late {
			p.Expire(failed)
		}
	})
}
