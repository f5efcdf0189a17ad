// Package admission bounds the openings of sessions that are under way at a replica.
//
// After an outage all agents connect at once, and each gives up a handshake after some seconds. If all handshakes
// shared the processors, most would be given up before their end, and what they cost would be lost. Admission bounds
// what has begun, and lets few handshakes compute at once, of which those that have begun go before others; it begins
// none while openings wait long for recovery. Sources of connections take turns.
//
// A handshake that waits for its client holds no turn. The openings of one source are bounded as well, since many
// agents may share what is slow: a machine, a link, a balancer. A client that sends nothing keeps those of other
// sources out never, and those of its own for a short time; see Place.
package admission

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"time"
)

// ErrShed is returned for a handshake that was not begun, since this replica could not have opened a session for it in
// time.
var ErrShed = errors.New("shed before TLS: other openings come first")

// Admission decides when handshakes may begin and go on. Use New; its methods may be called by several goroutines.
type Admission struct {
	limits limits
	// delay returns how long the oldest opening has waited for its call to recovery.
	delay func() time.Duration
	// onStall is called when a place is given up since its client was awaited for long; nil: it is not called.
	onStall func()

	mu      sync.Mutex
	running int
	begun   []chan struct{} // handshakes that wait to go on, in their order
	sources map[string]*source
	waiting int         // handshakes that wait to begin
	opening int         // openings of all sources that have begun, without those given up
	ready   []*source   // have handshakes that may begin; the next is the first one's
	timer   *time.Timer // of the next look at delay; nil: none is needed
	held    bool        // handshakes had to wait for openings, or were shed, since TakeHeld was called
}

// source is where connections come from. One without connections that open is forgotten.
type source struct {
	name     string
	openings int             // that have begun, without those given up
	fresh    []chan struct{} // handshakes that wait to begin, in their order
	ready    bool            // it is among those that are ready
}

type limits struct {
	Turns      int           // handshakes that compute at once; default two for each processor
	Window     int           // openings of one source under way at once; default 128 for each processor
	Stall      time.Duration // for which the client of an opening may be awaited, all its waits together
	Delay      time.Duration // no handshake begins while an opening has waited for longer
	Patience   time.Duration // after which a handshake that could not begin is shed
	DelayEvery time.Duration // how often delay is read while handshakes wait for it
}

// defaults are the limits of a replica. With a shorter Stall, a machine whose agents are slower than that is given ever
// more handshakes to do, and ends none of them. Patience and the handshake after it are within the agents' limit of a
// handshake, 8 s: an agent that waits costs this replica a connection, while one that is shed has computed its part of
// a handshake for nothing, and comes again.
var defaults = limits{
	Stall: 4 * time.Second, Delay: 4 * time.Second, Patience: 6500 * time.Millisecond, DelayEvery: 50 * time.Millisecond,
}

// New returns an admission with the default limits. The delay is how long the oldest opening has waited for its
// call to recovery; onStall is called when a place is given up since its client was awaited for long.
func New(delay func() time.Duration, onStall func()) *Admission {
	a := limited(defaults, delay)
	a.onStall = onStall
	return a
}

func limited(with limits, delay func() time.Duration) *Admission {
	if with.Turns == 0 {
		with.Turns = 2 * runtime.GOMAXPROCS(0)
	}
	if with.Window == 0 {
		with.Window = 128 * runtime.GOMAXPROCS(0)
	}
	return &Admission{limits: with, delay: delay, sources: map[string]*source{}}
}

// begin waits until a handshake of a source may begin, and returns the place of its opening. The turn is to be ended by
// a call of rest.
func (a *Admission) begin(ctx context.Context, name string) (*Place, error) {
	patience := time.NewTimer(a.limits.Patience)
	defer patience.Stop()
	from, turn := a.queueFresh(name)
	select {
	case <-turn:
		return &Place{admission: a, of: from, left: a.limits.Stall}, nil
	case <-patience.C:
		return nil, a.leaveFresh(from, turn, ErrShed)
	case <-ctx.Done():
		return nil, a.leaveFresh(from, turn, context.Cause(ctx))
	}
}

// goOn waits until a handshake that has begun may compute again.
func (a *Admission) goOn(ctx context.Context) error {
	turn := make(chan struct{})
	a.mu.Lock()
	a.begun = append(a.begun, turn)
	a.giveTurnsLocked()
	a.mu.Unlock()
	select {
	case <-turn:
		return nil
	case <-ctx.Done():
		return a.leaveBegun(turn, context.Cause(ctx))
	}
}

// Shed records that a connection was closed before TLS.
func (a *Admission) Shed() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.held = true
}

// TakeHeld returns whether connections were shed, or handshakes had to wait for openings, since it was called last.
func (a *Admission) TakeHeld() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	held := a.held
	a.held = false
	return held
}

// Crowded reports whether more than n handshakes wait to begin.
func (a *Admission) Crowded(n int) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.waiting > n
}

// Openings returns how many openings are under way, without those that were given up.
func (a *Admission) Openings() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.opening
}

// endTurn ends a turn.
func (a *Admission) endTurn() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.running--
	a.giveTurnsLocked()
}

func (a *Admission) queueFresh(name string) (*source, chan struct{}) {
	turn := make(chan struct{})
	a.mu.Lock()
	defer a.mu.Unlock()
	from := a.sources[name]
	if from == nil {
		from = &source{name: name}
		a.sources[name] = from
	}
	from.fresh = append(from.fresh, turn)
	a.waiting++
	a.readyLocked(from)
	a.giveTurnsLocked()
	return from, turn
}

// leaveFresh removes a handshake that waits no longer to begin, and returns err. If its turn has come meanwhile, turn
// and place are given on.
func (a *Admission) leaveFresh(from *source, turn chan struct{}, err error) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if i := slices.Index(from.fresh, turn); i >= 0 {
		from.fresh = slices.Delete(from.fresh, i, i+1)
		a.waiting--
		a.readyLocked(from)
		return err
	}
	a.running--
	a.opening--
	from.openings--
	a.readyLocked(from)
	a.giveTurnsLocked()
	return err
}

// leaveBegun does the same for a handshake that has begun, and keeps its place.
func (a *Admission) leaveBegun(turn chan struct{}, err error) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if i := slices.Index(a.begun, turn); i >= 0 {
		a.begun = slices.Delete(a.begun, i, i+1)
		return err
	}
	a.running--
	a.giveTurnsLocked()
	return err
}

// readyLocked puts a source last among those of which a handshake may begin, if it is one of them, and forgets it if
// nothing of it is left.
func (a *Admission) readyLocked(s *source) {
	switch {
	case s.ready:
	case len(s.fresh) > 0 && s.openings < a.limits.Window:
		s.ready = true
		a.ready = append(a.ready, s)
	case len(s.fresh) == 0 && s.openings == 0 && a.sources[s.name] == s:
		delete(a.sources, s.name)
	}
}

// giveTurnsLocked gives turns to those that wait.
func (a *Admission) giveTurnsLocked() {
	for a.running < a.limits.Turns && len(a.begun) > 0 {
		a.begun = a.giveLocked(a.begun)
	}
	if a.running >= a.limits.Turns || len(a.ready) == 0 {
		return
	}
	if a.delay() > a.limits.Delay {
		a.held = true
		a.readDelayAgainLocked()
		return
	}
	for a.running < a.limits.Turns && len(a.ready) > 0 {
		s := a.ready[0]
		a.ready[0] = nil
		a.ready = a.ready[1:]
		s.ready = false
		if len(s.fresh) > 0 && s.openings < a.limits.Window {
			s.fresh = a.giveLocked(s.fresh)
			s.openings++
			a.opening++
			a.waiting--
		}
		a.readyLocked(s)
	}
}

func (a *Admission) giveLocked(waiting []chan struct{}) []chan struct{} {
	close(waiting[0])
	waiting[0] = nil
	a.running++
	if len(waiting) == 1 {
		return nil
	}
	return waiting[1:]
}

// readDelayAgainLocked has delay read again after a while, as long as handshakes wait to begin.
func (a *Admission) readDelayAgainLocked() {
	if a.timer != nil {
		return
	}
	a.timer = time.AfterFunc(a.limits.DelayEvery, func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.timer = nil
		a.giveTurnsLocked()
	})
}
