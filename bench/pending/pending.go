// Package pending matches the end of a unit with the goroutine that began it, whichever of the two comes first.
package pending

import (
	"sync"
	"time"
)

// Units are the units that have begun or ended, and not both.
type Units[K comparable] struct {
	mu   sync.Mutex
	ends map[K]chan time.Time
}

// New returns no units.
func New[K comparable]() *Units[K] { return &Units[K]{ends: map[K]chan time.Time{}} }

// meet returns the channel of a unit, which the first of the two makes and the second removes.
func (u *Units[K]) meet(id K) chan time.Time {
	u.mu.Lock()
	defer u.mu.Unlock()
	if ch, ok := u.ends[id]; ok {
		delete(u.ends, id)
		return ch
	}
	u.ends[id] = make(chan time.Time, 1)
	return u.ends[id]
}

// Ended records when a unit ended. A second end of a unit that is not expected yet counts for nothing.
func (u *Units[K]) Ended(id K, at time.Time) {
	select {
	case u.meet(id) <- at:
	default:
	}
}

// Expect returns a channel that gets the time at which a unit ended.
func (u *Units[K]) Expect(id K) <-chan time.Time { return u.meet(id) }
