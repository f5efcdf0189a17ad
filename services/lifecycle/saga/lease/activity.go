package lease

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

// extended moves the local end of the lease to until if that is later, and ends the step's context if the run is
// cancelled.
func (a *Activity) extended(until time.Time, cancelled bool) {
	a.mu.Lock()
	if !a.dead && until.After(a.deadline) {
		a.deadline = until
	}
	a.mu.Unlock()
	if cancelled {
		a.cancelled()
	}
}

// cancelled ends the context of a forward step. Once the run compensates, it only notes the cancel.
func (a *Activity) cancelled() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.cancelAt = true
	if a.cancel != nil && !a.undoing {
		a.cancel(saga.ErrCancelRequested)
	}
}

// Activity is one run that this driver has leased.
type Activity struct {
	// Leased is the run. It belongs to the goroutine that drives it.
	Leased *Run

	id string // of the run

	beating atomic.Bool // a heartbeat for this run alone waits for its row

	mu       sync.Mutex
	cancel   context.CancelCauseFunc // of the step's context
	deadline time.Time               // local end of the lease, monotonic
	fence    int64
	dead     bool // the lease is lost; this driver writes nothing more for the run
	cancelAt bool // a cancel has been seen
	undoing  bool // the run compensates: a cancel changes nothing
}

// Enter makes cancel end the step's context until Leave. It calls cancel at once if the lease is lost, or if the run is
// cancelled and the step is a forward one; it reports whether it did.
func (a *Activity) Enter(cancel context.CancelCauseFunc, undoing bool) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.cancel = cancel
	a.undoing = undoing
	switch {
	case a.dead:
		cancel(saga.ErrFenced)
	case a.cancelAt && !a.undoing:
		cancel(saga.ErrCancelRequested)
	default:
		return false
	}
	return true
}

// Leave ends Enter.
func (a *Activity) Leave() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.cancel = nil
}

// SetFence sets the fence with which heartbeats extend the lease. An abandoned step raises it.
func (a *Activity) SetFence(fence int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.fence = fence
}

// End cancels the step that runs, if any; the driver goes on with the run.
func (a *Activity) End(cause error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.cancel != nil {
		a.cancel(cause)
	}
}

// Lose marks the lease as lost: the step's context ends, and this driver writes nothing more for the run.
func (a *Activity) Lose(cause error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.dead = true
	if a.cancel != nil {
		a.cancel(cause)
	}
}

// Lost reports whether the lease is lost.
func (a *Activity) Lost() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.dead
}
