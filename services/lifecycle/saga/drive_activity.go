package saga

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// extended moves the local end of the lease to until if that is later, and ends the step's context if the run is
// cancelled.
func (a *activity) extended(until time.Time, cancelled bool) {
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
func (a *activity) cancelled() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.cancelAt = true
	if a.cancel != nil && !a.undoing {
		a.cancel(ErrCancelRequested)
	}
}

// activity is one run that this driver has leased.
type activity struct {
	id string     // of the run
	h  *leasedRun // belongs to the goroutine that drives it

	beating atomic.Bool // a heartbeat for this run alone waits for its row

	mu       sync.Mutex
	cancel   context.CancelCauseFunc // of the step's context
	deadline time.Time               // local end of the lease, monotonic
	fence    int64
	dead     bool // the lease is lost; this driver writes nothing more for the run
	cancelAt bool // a cancel has been seen
	undoing  bool // the run compensates: a cancel changes nothing
}

// end cancels the step that runs, if any; the driver goes on with the run.
func (a *activity) end(cause error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.cancel != nil {
		a.cancel(cause)
	}
}

// lose marks the lease as lost: the step's context ends, and this driver writes nothing more for the run.
func (a *activity) lose(cause error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.dead = true
	if a.cancel != nil {
		a.cancel(cause)
	}
}

func (a *activity) lost() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.dead
}
