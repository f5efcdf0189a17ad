package events

import (
	"context"
	"time"
)

// sharedFor is how long a position that one consumer of a process has read serves the others, unless something is notified meanwhile.
const sharedFor = 500 * time.Millisecond

// horizons is the end of the log as the consumers of a process share it, under the lock of their signal.
type horizons struct {
	reading  chan struct{} // of one place: who has it reads
	pos      int64
	read     time.Time // when the read began; zero if pos says nothing
	notified uint64    // counts the notifications
	began    time.Time // of the first rest
}

// horizon returns the end of the log: what read returns, or what another consumer of the process has read a moment ago. Where no connection listens, each
// reads by itself. What was read before a notification serves none that asks after it.
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

// untilTogether returns how long a consumer sleeps that s wakes: the shorter time, or where a connection listens until the moment, once in ten seconds, at
// which all consumers of the process look together.
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
