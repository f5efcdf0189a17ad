// Package batch gathers calls of many callers into few calls of a service. It needs no timer: a batch is the requests
// that came while the previous calls were under way, so an idle mesh pays no delay and a storm pays few round trips.
package batch

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// ErrLength is returned if a service answered a batch with a number of results other than the number of requests.
var ErrLength = errors.New("batch answered with another number of results")

// callWithin bounds one call.
const callWithin = 10 * time.Second

// Refused reports whether a call was refused for its content: it is invalid, or too large, which a transport's limit
// reports as exhausted. Sending the same content again would not help; sending its parts may.
func Refused(err error) bool {
	switch fault.ReasonOf(err) { // every other reason is about the moment or the callee
	case commonv1.Reason_REASON_INVALID_ARGUMENT, commonv1.Reason_REASON_FRAME_TOO_LARGE,
		commonv1.Reason_REASON_RATE_LIMITED:
		return true
	default:
		return false
	}
}

// Batcher gathers requests of type Q that are answered by R. The zero value is not usable; see New.
type Batcher[Q, R any] struct {
	call  func(context.Context, []Q) ([]R, error)
	max   int
	lane  int
	pause time.Duration
	most  time.Duration
	busy  func(waiting int) bool // nil: calls yield to nothing
	whole bool                   // full calls yield as well
	fails func(int, error)       // nil: no one is told of failed calls
	wake  chan struct{}          // has a token while requests may be waiting that Run has not seen

	mu      sync.Mutex
	waiting []item[Q, R] // in the order in which they came
}

type item[Q, R any] struct {
	ctx   context.Context //nolint:containedctx // of the caller, to whom the result goes
	since time.Time
	req   Q
	done  func(R, error)
}

type result[R any] struct {
	res R
	err error
}

// New makes a batcher that carries at most max requests in a call and has at most lanes calls under way.
func New[Q, R any](maxItems, lanes int, call func(context.Context, []Q) ([]R, error)) *Batcher[Q, R] {
	return &Batcher[Q, R]{call: call, max: maxItems, lane: lanes, wake: make(chan struct{}, 1)}
}

// Gather has a call begin only after the one before it has ended or has lasted for pause, and returns b. Under load
// calls are fewer and larger then, while one slow call does not stop the others. It must be called before Run.
func (b *Batcher[Q, R]) Gather(pause time.Duration) *Batcher[Q, R] {
	b.pause = pause
	return b
}

// Yield has a call that is not full wait while busy returns true for the number of its requests, until the oldest of
// them has waited for most, and returns b. It must be called before Run.
func (b *Batcher[Q, R]) Yield(most time.Duration, busy func(waiting int) bool) *Batcher[Q, R] {
	b.most, b.busy = most, busy
	return b
}

// EvenFull has full calls yield as well, and returns b. It must be called before Run.
func (b *Batcher[Q, R]) EvenFull() *Batcher[Q, R] {
	b.whole = true
	return b
}

// Failed has fails called once for each call that fails, with the number of its requests, and returns b. A call that is
// refused for its content is none: its requests are told so. Nor is one that ends with Run. It must be called before
// Run.
func (b *Batcher[Q, R]) Failed(fails func(requests int, err error)) *Batcher[Q, R] {
	b.fails = fails
	return b
}

// busyEvery is how often busy is asked.
const busyEvery = 20 * time.Millisecond

// yield waits as Yield says. It returns false if ctx ended first.
func (b *Batcher[Q, R]) yield(ctx context.Context) bool {
	if b.busy == nil {
		return true
	}
	for {
		n := b.count()
		if b.Delay() >= b.most || n >= b.max && !b.whole || !b.busy(n) {
			return true
		}
		select {
		case <-time.After(min(busyEvery, b.most)):
		case <-ctx.Done():
			return false
		}
	}
}

func (b *Batcher[Q, R]) count() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.waiting)
}

// Do sends a request with one of the next calls and returns its result. It returns the cause of ctx if that ends first;
// a request that still waits then is not sent.
func (b *Batcher[Q, R]) Do(ctx context.Context, req Q) (R, error) {
	var zero R
	out := make(chan result[R], 1)
	b.Post(ctx, req, func(res R, err error) { out <- result[R]{res: res, err: err} })
	select {
	case r := <-out:
		return r.res, r.err
	case <-ctx.Done():
		return zero, context.Cause(ctx)
	}
}

// Post sends a request with one of the next calls and does not wait for it, so that a request which waits needs no
// goroutine. done is called with the result in the goroutine of the call, which it must not block. It is not called if
// Run has ended or ctx ends before the call has begun.
func (b *Batcher[Q, R]) Post(ctx context.Context, req Q, done func(R, error)) {
	b.mu.Lock()
	b.waiting = append(b.waiting, item[Q, R]{ctx: ctx, since: time.Now(), req: req, done: done})
	b.mu.Unlock()
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// Delay returns how long the oldest of the requests that no call has taken yet has waited; zero without one.
func (b *Batcher[Q, R]) Delay() time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.dropLocked()
	if len(b.waiting) == 0 {
		return 0
	}
	return time.Since(b.waiting[0].since)
}

// Run serves until ctx ends. It waits for the calls under way.
func (b *Batcher[Q, R]) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	lanes := make(chan struct{}, b.lane)
	for {
		select {
		case <-b.wake:
		case <-ctx.Done():
			return nil
		}
		for b.pending() {
			if !b.yield(ctx) {
				return nil
			}
			// The lane is taken before the batch is closed, so that requests which come while all lanes are busy join the batch.
			select {
			case lanes <- struct{}{}:
			case <-ctx.Done():
				return nil // callers wait for ctx too, or for the end of theirs
			}
			items := b.take()
			if len(items) == 0 {
				<-lanes
				break
			}
			done := make(chan struct{})
			wg.Go(func() {
				defer func() { <-lanes; close(done) }()
				b.serve(ctx, items)
			})
			b.pauseOr(done)
		}
	}
}

// pauseOr returns when done is closed, or after the pause between two calls.
func (b *Batcher[Q, R]) pauseOr(done <-chan struct{}) {
	if b.pause <= 0 {
		return
	}
	timer := time.NewTimer(b.pause)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
	}
}

func (b *Batcher[Q, R]) pending() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.dropLocked()
	return len(b.waiting) > 0
}

// dropLocked drops the oldest requests whose callers have gone.
func (b *Batcher[Q, R]) dropLocked() {
	gone := 0
	for gone < len(b.waiting) && b.waiting[gone].ctx.Err() != nil {
		gone++
	}
	b.cutLocked(gone)
}

// cutLocked removes the oldest n requests.
func (b *Batcher[Q, R]) cutLocked(n int) {
	clear(b.waiting[:n])
	b.waiting = b.waiting[n:]
	if len(b.waiting) == 0 {
		b.waiting = nil
	}
}

// take removes the requests of the next call, without those whose callers have gone.
func (b *Batcher[Q, R]) take() []item[Q, R] {
	b.mu.Lock()
	defer b.mu.Unlock()
	var items []item[Q, R]
	n := 0
	for ; n < len(b.waiting) && len(items) < b.max; n++ {
		if b.waiting[n].ctx.Err() == nil {
			items = append(items, b.waiting[n])
		}
	}
	b.cutLocked(n)
	return items
}

// within makes a call that is given up after callWithin.
func (b *Batcher[Q, R]) within(ctx context.Context, reqs []Q) ([]R, error) {
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	return b.call(ctx, reqs)
}

// serve sends items in one call and delivers their results. A call that is refused for its content is split in two, so
// that one bad request does not have the others refused with it.
func (b *Batcher[Q, R]) serve(ctx context.Context, items []item[Q, R]) {
	reqs := make([]Q, len(items))
	for i, it := range items {
		reqs[i] = it.req
	}
	res, err := b.within(ctx, reqs)
	if err == nil && len(res) != len(items) {
		err = fmt.Errorf("%w: %d for %d", ErrLength, len(res), len(items))
	}
	if len(items) > 1 && Refused(err) {
		b.serve(ctx, items[:len(items)/2])
		b.serve(ctx, items[len(items)/2:])
		return
	}
	if err != nil && b.fails != nil && !Refused(err) && ctx.Err() == nil {
		b.fails(len(items), err)
	}
	var none R
	for i, it := range items {
		if err != nil {
			it.done(none, err)
			continue
		}
		it.done(res[i], nil)
	}
}
