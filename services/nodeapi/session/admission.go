package session

import (
	"context"
	"errors"
	"net"
	"runtime"
	"sync"
	"time"
)

// errShed is returned for a handshake that was not begun, since this replica could not have opened a session for it in
// time.
var errShed = errors.New("shed before TLS: other openings come first")

// After an outage all agents connect at once, and each gives up a handshake after some seconds. If all handshakes
// shared the processors, most would be given up before their end, and what they cost would be lost. admission lets few
// compute at once, and those that have begun go before others; it begins none while openings wait long for recovery.
//
// A handshake that waits for its client holds no turn, so clients that send nothing keep no one out.
type admission struct {
	limits admissionLimits
	// delay returns how long the oldest opening has waited for its call to recovery.
	delay func() time.Duration

	mu      sync.Mutex
	running int
	begun   []chan struct{} // handshakes that wait to go on, in their order
	fresh   []chan struct{} // handshakes that wait to begin, in their order
	timer   *time.Timer     // of the next look at delay; nil: none is needed
	held    bool            // handshakes had to wait for openings, or were shed, since takeHeld was called
}

type admissionLimits struct {
	Turns    int           // handshakes that compute at once
	Delay    time.Duration // no handshake begins while an opening has waited for longer
	Patience time.Duration // after which a handshake that could not begin is shed
	Look     time.Duration // how often delay is read while handshakes wait for it
}

var defaultAdmission = admissionLimits{
	Delay: 4 * time.Second, Patience: 2500 * time.Millisecond, Look: 50 * time.Millisecond,
}

func newAdmission(limits admissionLimits, delay func() time.Duration) *admission {
	if limits.Turns == 0 {
		limits.Turns = 2 * runtime.GOMAXPROCS(0)
	}
	return &admission{limits: limits, delay: delay}
}

// begin waits until a handshake may begin, which is to be ended by a call of rest.
func (a *admission) begin(ctx context.Context) error {
	patience := time.NewTimer(a.limits.Patience)
	defer patience.Stop()
	turn := a.queue(&a.fresh)
	select {
	case <-turn:
		return nil
	case <-patience.C:
		return a.leave(&a.fresh, turn, errShed)
	case <-ctx.Done():
		return a.leave(&a.fresh, turn, context.Cause(ctx))
	}
}

// goOn waits until a handshake that has begun may compute again.
func (a *admission) goOn(ctx context.Context) error {
	turn := a.queue(&a.begun)
	select {
	case <-turn:
		return nil
	case <-ctx.Done():
		return a.leave(&a.begun, turn, context.Cause(ctx))
	}
}

// shed records that a connection was closed before TLS.
func (a *admission) shed() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.held = true
}

// takeHeld returns whether connections were shed, or handshakes had to wait for openings, since it was called last.
func (a *admission) takeHeld() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	held := a.held
	a.held = false
	return held
}

// rest ends a turn.
func (a *admission) rest() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.running--
	a.nextLocked()
}

func (a *admission) queue(in *[]chan struct{}) chan struct{} {
	turn := make(chan struct{})
	a.mu.Lock()
	defer a.mu.Unlock()
	*in = append(*in, turn)
	a.nextLocked()
	return turn
}

// leave removes a handshake that waits no longer, and returns err. If its turn has come meanwhile, the turn is ended.
func (a *admission) leave(from *[]chan struct{}, turn chan struct{}, err error) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i, other := range *from {
		if other == turn {
			*from = append((*from)[:i:i], (*from)[i+1:]...)
			return err
		}
	}
	a.running--
	a.nextLocked()
	return err
}

// nextLocked gives turns to those that wait.
func (a *admission) nextLocked() {
	for a.running < a.limits.Turns && len(a.begun) > 0 {
		a.begun = a.giveLocked(a.begun)
	}
	if a.running >= a.limits.Turns || len(a.fresh) == 0 {
		return
	}
	if a.delay() > a.limits.Delay {
		a.held = true
		a.lookAgainLocked()
		return
	}
	for a.running < a.limits.Turns && len(a.fresh) > 0 {
		a.fresh = a.giveLocked(a.fresh)
	}
}

func (a *admission) giveLocked(waiting []chan struct{}) []chan struct{} {
	close(waiting[0])
	waiting[0] = nil
	a.running++
	if len(waiting) == 1 {
		return nil
	}
	return waiting[1:]
}

// lookAgainLocked has delay read again after a while, as long as handshakes wait to begin.
func (a *admission) lookAgainLocked() {
	if a.timer != nil {
		return
	}
	a.timer = time.AfterFunc(a.limits.Look, func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.timer = nil
		a.nextLocked()
	})
}

// turns is a connection during its handshake: it holds a turn whenever it is not waiting for its client.
type turns struct {
	net.Conn

	admission *admission
	ctx       context.Context //nolint:containedctx // of the handshake, which gives its own to no method
	begun     bool
	holds     bool
	over      bool // the handshake has ended
}

// Read reads without a turn, and waits for one.
func (t *turns) Read(b []byte) (int, error) {
	if t.over {
		return t.Conn.Read(b)
	}
	t.rest()
	n, err := t.Conn.Read(b)
	if err != nil {
		return n, err
	}
	if t.begun {
		err = t.admission.goOn(t.ctx)
	} else {
		err = t.admission.begin(t.ctx)
	}
	if err != nil {
		return 0, err
	}
	t.begun, t.holds = true, true
	return n, nil
}

// end ends the handshake.
func (t *turns) end() {
	t.rest()
	t.over, t.ctx = true, nil
}

func (t *turns) rest() {
	if t.holds {
		t.holds = false
		t.admission.rest()
	}
}
