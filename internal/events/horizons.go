package events

import (
	"context"
	"time"
)

// sharedFor is how long the other consumers of a process use a position that one of them has read, unless a
// notification comes meanwhile.
const sharedFor = 500 * time.Millisecond

// horizons is the end of the log as the consumers of a process share it, under the lock of their signal.
type horizons struct {
	reading  chan struct{} // capacity 1: the goroutine that has the place reads
	pos      int64
	read     time.Time // when the read began; zero if pos is not valid
	notified uint64    // counts the notifications
	began    time.Time // of the first rest
}

// horizon returns the end of the log: the result of read, or the position that another consumer of the process has read
// a moment ago. If no connection listens, each consumer reads by itself. A position that was read before a notification
// is not returned after it.
func (s *Signal) horizon(ctx context.Context, read func(context.Context) (int64, error)) (int64, error) {
	if !s.Listening() {
		return read(ctx)
	}
	s.mu.Lock()
	if s.shared.reading == nil {
		s.shared.reading = make(chan struct{}, 1)
	}
	reading := s.shared.reading
	s.mu.Unlock()
	select {
	case reading <- struct{}{}:
		defer func() { <-reading }()
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
	s.mu.Lock()
	pos, began, notified := s.shared.pos, time.Now(), s.shared.notified
	fresh := !s.shared.read.IsZero() && began.Sub(s.shared.read) < sharedFor
	s.mu.Unlock()
	if fresh {
		return pos, nil
	}
	pos, err := read(ctx)
	if err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.shared.notified == notified {
		s.shared.pos, s.shared.read = pos, began
	}
	return pos, nil
}

// untilTogether returns how long a consumer that s wakes may sleep: the shorter time, or if a connection listens, until
// the moment, once in ten seconds, at which all consumers of the process read the end of the log together.
func (s *Signal) untilTogether(short time.Duration) time.Duration {
	if !s.Listening() {
		return short
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.shared.began.IsZero() {
		s.shared.began = time.Now()
	}
	return quiet - time.Since(s.shared.began)%quiet
}
