package events

import (
	"context"
	"sync"
	"time"
)

// Signal wakes any number of waiting goroutines when something has happened. It carries no data and keeps no history:
// take the channel first, then read the state, then wait. The zero value is ready; a nil Signal never fires.
type Signal struct {
	mu        sync.Mutex
	ch        chan struct{}
	urge      chan struct{}
	listening int // connections that pass on what other processes notify
	shared    horizons
}

// C returns a channel that is closed at the next Notify.
func (s *Signal) C() <-chan struct{} {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ch == nil {
		s.ch = make(chan struct{})
	}
	return s.ch
}

// Notify wakes all goroutines that wait on the channel. It never blocks.
func (s *Signal) Notify() {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.shared.read = time.Time{} // there may be more
	s.shared.notified++
	if s.ch != nil {
		close(s.ch)
		s.ch = nil
	}
}

// Urge is Notify for an event that a caller waits for: the sequencer then does not linger.
func (s *Signal) Urge() {
	if s == nil {
		return
	}
	s.mu.Lock()
	if s.urge != nil {
		close(s.urge)
		s.urge = nil
	}
	s.mu.Unlock()
	s.Notify()
}

// urgent returns a channel that is closed at the next Urge.
func (s *Signal) urgent() <-chan struct{} {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.urge == nil {
		s.urge = make(chan struct{})
	}
	return s.urge
}

// Listening reports whether a connection to the database passes on what other processes notify.
func (s *Signal) Listening() bool {
	if s == nil {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.listening > 0
}

// listen notes that a connection begins to listen, and returns a function that notes its end. Both wake all loops that
// hold the channel: at the beginning since notifications may have been missed before, at the end since the loops have
// to poll at their short period from then on.
func (s *Signal) listen() func() {
	change := func(by int) {
		s.mu.Lock()
		s.listening += by
		s.mu.Unlock()
		s.Notify()
	}
	change(1)
	return sync.OnceFunc(func() { change(-1) })
}

// quiet is how long a loop that other processes wake sleeps at most while a connection listens for their notifications.
// It is also the longest delay with which a change is found whose notification was lost with its sender.
const quiet = 10 * time.Second

// Period returns how long a loop that s wakes may sleep: the shorter time, or ten seconds if that is more and a
// connection listens.
func (s *Signal) Period(short time.Duration) time.Duration {
	if s.Listening() {
		return max(short, quiet)
	}
	return short
}

// Pace sleeps between two rounds of a loop that looks for what other processes have done, and reports whether ctx is
// still alive. A notification of now ends the sleep at once, one of wake at the earliest after the short time: rounds
// that follow notifications come no more often than that. Without a notification the sleep lasts the Period. The caller
// takes the channels of both before its round.
func (s *Signal) Pace(ctx context.Context, now, wake <-chan struct{}, short time.Duration) bool {
	return s.PaceWithin(ctx, now, wake, short, quiet)
}

// PaceWithin is Pace with a longest sleep that the caller chooses instead of ten seconds: for a loop that also waits
// for changes that are not notified.
func (s *Signal) PaceWithin(ctx context.Context, now, wake <-chan struct{}, short, long time.Duration) bool {
	timer := time.NewTimer(short)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-now:
		return true
	case <-timer.C:
	}
	if long <= short || !s.Listening() {
		return true
	}
	timer.Reset(long - short)
	select {
	case <-ctx.Done():
		return false
	case <-now:
	case <-wake:
	case <-timer.C:
	}
	return true
}

// Reading is the moment at which a value was read whose changes are notified. The zero value stands for none.
type Reading struct {
	signal *Signal
	at     time.Time
	news   <-chan struct{}
}

// Reading returns the moment of a read that begins now.
func (s *Signal) Reading() Reading {
	return Reading{signal: s, at: time.Now(), news: s.C()}
}

// Due reports whether the value is to be read again: it was read longer ago than the short time, and there was a
// notification since, or it was read longer ago than the Period.
func (r Reading) Due(short time.Duration) bool {
	if r.at.IsZero() {
		return true
	}
	age := time.Since(r.at)
	select {
	case <-r.news:
		return age >= short
	default:
		return age >= r.signal.Period(short)
	}
}
