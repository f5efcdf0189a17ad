package events

import "sync"

// Signal tells any number of waiting goroutines that something happened. It carries no data and keeps no history: take
// the channel first, then look, then wait. The zero value is ready; a nil Signal never fires.
type Signal struct {
	mu sync.Mutex
	ch chan struct{}
}

// C is closed at the next Notify.
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

// Notify wakes all who hold the channel. It never blocks.
func (s *Signal) Notify() {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ch != nil {
		close(s.ch)
		s.ch = nil
	}
}
