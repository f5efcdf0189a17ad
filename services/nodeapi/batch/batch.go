// Package batch gathers calls of many callers into few calls of a service. It clocks itself: a batch is whatever came while the previous call was
// under way, so an idle mesh pays no delay and a storm pays few round trips.
package batch

import (
	"context"
	"errors"
	"fmt"
	"sync"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// ErrLength says that a service answered a batch with another number of results than it was asked for.
var ErrLength = errors.New("batch answered with another number of results")

// Refused says whether a call was refused for what it carries: invalid, or too large, which a transport's limit calls exhausted. Sending the same
// again would not help; sending its parts may.
func Refused(err error) bool {
	switch fault.ReasonOf(err) { //nolint:exhaustive // every other reason is about the moment or the callee
	case commonv1.Reason_REASON_INVALID_ARGUMENT, commonv1.Reason_REASON_FRAME_TOO_LARGE, commonv1.Reason_REASON_RATE_LIMITED:
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

// Do asks and waits for the answer, or for ctx.
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
		// The lane is taken before the batch is closed, so that what comes while all lanes are busy rides along.
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

// serve returns items by one call. A call that is refused for what it carries is split, so that one bad request does not refuse all that ride with it.
func (b *Batcher[Q, R]) serve(ctx context.Context, items []item[Q, R]) {
	reqs := make([]Q, len(items))
	for i, it := range items {
		reqs[i] = it.req
	}
	res, err := b.call(ctx, reqs)
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
