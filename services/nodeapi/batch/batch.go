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
	call func(context.Context, []Q) ([]R, error)
	max  int
	lane int
	in   chan item[Q, R]
}

type item[Q, R any] struct {
	req Q
	out chan<- result[R]
}

type result[R any] struct {
	res R
	err error
}

// New makes a batcher that carries at most max requests in a call and has at most lanes calls under way.
func New[Q, R any](maxItems, lanes int, call func(context.Context, []Q) ([]R, error)) *Batcher[Q, R] {
	return &Batcher[Q, R]{call: call, max: maxItems, lane: lanes, in: make(chan item[Q, R], maxItems)}
}

// Do sends a request with one of the next calls and returns its result. It returns the cause of ctx if that ends first.
func (b *Batcher[Q, R]) Do(ctx context.Context, req Q) (R, error) {
	var zero R
	out := make(chan result[R], 1)
	select {
	case b.in <- item[Q, R]{req: req, out: out}:
	case <-ctx.Done():
		return zero, context.Cause(ctx)
	}
	select {
	case r := <-out:
		return r.res, r.err
	case <-ctx.Done():
		return zero, context.Cause(ctx)
	}
}

// Run serves until ctx ends. It waits for the calls under way.
func (b *Batcher[Q, R]) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	lanes := make(chan struct{}, b.lane)
	for {
		var first item[Q, R]
		select {
		case first = <-b.in:
		case <-ctx.Done():
			return nil
		}
		// The lane is taken before the batch is closed, so that requests which come while all lanes are busy join the batch.
		select {
		case lanes <- struct{}{}:
		case <-ctx.Done():
			first.out <- result[R]{err: context.Cause(ctx)}
			return nil
		}
		items := b.gather(first)
		wg.Go(func() {
			defer func() { <-lanes }()
			b.serve(ctx, items)
		})
	}
}

func (b *Batcher[Q, R]) gather(first item[Q, R]) []item[Q, R] {
	items := []item[Q, R]{first}
	for len(items) < b.max {
		select {
		case it := <-b.in:
			items = append(items, it)
		default:
			return items
		}
	}
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
	for i, it := range items {
		if err != nil {
			it.out <- result[R]{err: err}
			continue
		}
		it.out <- result[R]{res: res[i]}
	}
}
