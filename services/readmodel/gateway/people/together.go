package people

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"
)

// mostAtOnce is how many statements run at the same time at most. If one of them hangs, the other still serves callers.
const mostAtOnce = 2

// togetherTimeout is how long one statement may take. No caller's context cancels it, so that the other callers do not
// fail with one that leaves.
const togetherTimeout = 5 * time.Second

// errPanicked is the error of the callers of a batch whose statement panicked.
var errPanicked = errors.New("the statement of the batch panicked")

// together lets callers that want one row each share statements: while mostAtOnce statements run, further callers wait,
// and the next statement reads all their rows. A caller gets a row that was read after its call began.
type together[T any] struct {
	read func(ctx context.Context, ids []string) (map[string]T, error)

	mu      sync.Mutex
	running int
	next    *batch[T] // the batch that waits for a statement; nil: none
}

// batch is the set of rows that one statement reads.
type batch[T any] struct {
	ids    map[string]bool
	lead   chan struct{} // gets one element when one of the waiting callers is to run the statement
	called bool          // lead was sent to
	done   chan struct{} // closed when found and err are set
	found  map[string]T
	err    error
}

// get returns the row of an id, and whether it exists.
func (g *together[T]) get(ctx context.Context, id string) (T, bool, error) {
	g.mu.Lock()
	if g.next == nil {
		g.next = &batch[T]{ids: map[string]bool{}, lead: make(chan struct{}, 1), done: make(chan struct{})}
	}
	own := g.next
	own.ids[id] = true
	lead := g.running < mostAtOnce
	if lead {
		g.running++
		g.take(own)
	}
	g.mu.Unlock()
	if lead {
		g.lead(ctx, own)
	}
	for {
		select {
		case <-own.done:
			found, ok := own.found[id]
			return found, ok, own.err
		case <-own.lead:
			g.mu.Lock()
			lead = g.next == own
			if lead {
				g.take(own)
			} else {
				g.pass() // another caller has taken the batch meanwhile
			}
			g.mu.Unlock()
			if lead {
				g.lead(ctx, own)
			}
		case <-ctx.Done():
			var none T
			return none, false, context.Cause(ctx)
		}
	}
}

// take closes a batch to further callers. The caller holds mu and one of the mostAtOnce places.
func (g *together[T]) take(own *batch[T]) {
	g.next = nil
	select {
	case <-own.lead: // the lead was offered, and no waiting caller has received it
		g.running--
	default:
	}
}

// pass gives the place of a finished statement to the batch that waits, or frees it if none waits. The caller holds mu.
func (g *together[T]) pass() {
	if g.next == nil || g.next.called {
		g.running--
		return
	}
	g.next.called = true
	g.next.lead <- struct{}{}
}

// lead runs the statement of a batch and wakes its callers.
func (g *together[T]) lead(ctx context.Context, own *batch[T]) {
	defer func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.pass()
	}()
	defer close(own.done)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), togetherTimeout)
	defer cancel()
	own.err = errPanicked // stays if read panics
	own.found, own.err = g.read(ctx, slices.Collect(maps.Keys(own.ids)))
}
