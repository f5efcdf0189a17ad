package gateway

import (
	"context"
	"errors"
	"sync"
	"time"
)

// mostAtOnce is how many statements are under way at once: one that hangs leaves the other.
const mostAtOnce = 2

// togetherTimeout is how long one statement may take. It is no caller's: those that stay do not fail with one that
// leaves.
const togetherTimeout = 5 * time.Second

// errPanicked is what the callers of a batch get whose statement panicked.
var errPanicked = errors.New("the statement of the batch panicked")

// together lets callers that want a row each share statements: while mostAtOnce are under way, what is asked for waits,
// and is read by the next one. A caller gets what was read after it asked.
type together[T any] struct {
	read func(ctx context.Context, ids []string) (map[string]T, error)

	mu      sync.Mutex
	running int
	next    *batch[T] // what waits; nil: nothing
}

// batch is what one statement reads.
type batch[T any] struct {
	ids    map[string]bool
	turn   chan struct{} // has one element when one of those who wait is to read
	called bool          // it had
	done   chan struct{} // closed when found and err are set
	found  map[string]T
	err    error
}

// get returns the row of an id, and whether there is one.
func (g *together[T]) get(ctx context.Context, id string) (T, bool, error) {
	g.mu.Lock()
	if g.next == nil {
		g.next = &batch[T]{ids: map[string]bool{}, turn: make(chan struct{}, 1), done: make(chan struct{})}
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
		case <-own.turn:
			g.mu.Lock()
			lead = g.next == own
			if lead {
				g.take(own)
			} else {
				g.pass() // another caller has taken it meanwhile
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

// take closes a batch to further callers. It expects the lock to be held, and a place among those under way.
func (g *together[T]) take(own *batch[T]) {
	g.next = nil
	select {
	case <-own.turn: // no caller that waits has taken it yet
		g.running--
	default:
	}
}

// pass gives the place of a statement to the batch that waits. It expects the lock to be held.
func (g *together[T]) pass() {
	if g.next == nil || g.next.called {
		g.running--
		return
	}
	g.next.called = true
	g.next.turn <- struct{}{}
}

// lead reads a batch.
func (g *together[T]) lead(ctx context.Context, own *batch[T]) {
	defer func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.pass()
	}()
	defer close(own.done)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), togetherTimeout)
	defer cancel()
	ids := make([]string, 0, len(own.ids))
	for id := range own.ids {
		ids = append(ids, id)
	}
	own.err = errPanicked // of a read that does not return
	own.found, own.err = g.read(ctx, ids)
}
