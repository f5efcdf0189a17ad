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

// Ended records when a unit ended. A second end of a unit that is not expected yet counts for nothing.
func (u *Units[K]) Ended(id K, at time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	end, known := u.ends[id]
	switch {
	case !known:
		end = make(chan time.Time, 1)
		u.ends[id] = end
	case len(end) > 0:
		return
	default:
		delete(u.ends, id)
	}
	end <- at
}

// Expect returns a channel that gets the time at which a unit ended.
func (u *Units[K]) Expect(id K) <-chan time.Time {
	u.mu.Lock()
	defer u.mu.Unlock()
	end, ended := u.ends[id]
	if ended {
		delete(u.ends, id)
		return end
	}
	end = make(chan time.Time, 1)
	u.ends[id] = end
	return end
}
