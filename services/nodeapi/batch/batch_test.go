package batch_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/services/nodeapi/batch"
)

// calls is a service that is called with batches: each call is announced, and ends when it is let go.
type calls struct {
	begun chan []int
	goOn  chan struct{}
}

func newCalls() *calls { return &calls{begun: make(chan []int, 64), goOn: make(chan struct{})} }

func (c *calls) call(ctx context.Context, reqs []int) ([]int, error) {
	c.begun <- reqs
	select {
	case <-c.goOn:
		return reqs, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// sizes returns the sizes of the calls that have begun since it was called last.
func (c *calls) sizes() []int {
	var out []int
	for {
		select {
		case reqs := <-c.begun:
			out = append(out, len(reqs))
		default:
			return out
		}
	}
}

// run runs a test of a batcher in a bubble, with a function that sends requests and returns when they wait.
func run(t *testing.T, pause time.Duration,
	test func(t *testing.T, c *calls, b *batch.Batcher[int, int], send func(ctx context.Context, n int)),
) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		c := newCalls()
		b := batch.New(8, 2, c.call).Gather(pause)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go func() { _ = b.Run(ctx) }()
		test(t, c, b, func(ctx context.Context, n int) {
			for i := range n {
				go func() {
					got, err := b.Do(ctx, i)
					if err == nil && got != i {
						t.Errorf("request %d is answered with %d", i, got)
					}
				}()
				synctest.Wait()
			}
		})
	})
}

func expect(t *testing.T, when string, got []int, want ...int) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: calls of %v, want %v", when, got, want)
	}
	for i := range got {
		if got[i] != want[i] {
			t.Fatalf("%s: calls of %v, want %v", when, got, want)
		}
	}
}

func TestRequestsThatComeDuringACallShareTheNext(t *testing.T) {
	const pause = 250 * time.Millisecond
	run(t, pause, func(t *testing.T, c *calls, b *batch.Batcher[int, int], send func(context.Context, int)) {
		t.Helper()
		send(t.Context(), 1)
		expect(t, "the first request", c.sizes(), 1)
		send(t.Context(), 5)
		expect(t, "while its call is under way", c.sizes())
		c.goOn <- struct{}{}
		synctest.Wait()
		expect(t, "after its end", c.sizes(), 5)
		send(t.Context(), 3)
		time.Sleep(pause)
		synctest.Wait()
		expect(t, "a slow call does not stop the next", c.sizes(), 3)
		send(t.Context(), 20)
		time.Sleep(2 * pause)
		synctest.Wait()
		expect(t, "with all lanes busy", c.sizes())
		if got := b.Delay(); got != 2*pause {
			t.Errorf("the oldest has waited for %s, want %s", got, 2*pause)
		}
		for range 5 {
			c.goOn <- struct{}{}
			synctest.Wait()
		}
		expect(t, "in full calls", c.sizes(), 8, 8, 4)
		if got := b.Delay(); got != 0 {
			t.Errorf("a delay of %s with nothing that waits", got)
		}
	})
}

func TestRequestsOfCallersThatAreGoneAreNotSent(t *testing.T) {
	run(t, time.Second, func(t *testing.T, c *calls, b *batch.Batcher[int, int], send func(context.Context, int)) {
		t.Helper()
		send(t.Context(), 1)
		expect(t, "the first request", c.sizes(), 1)
		gone, leave := context.WithCancelCause(t.Context())
		send(gone, 3)
		send(t.Context(), 2)
		leave(errors.New("the agent hung up"))
		synctest.Wait()
		c.goOn <- struct{}{}
		synctest.Wait()
		expect(t, "of those that are left", c.sizes(), 2)
		c.goOn <- struct{}{}
		synctest.Wait()
		if _, err := b.Do(gone, 7); err == nil || err.Error() != "the agent hung up" {
			t.Errorf("a caller that is gone gets %v", err)
		}
		synctest.Wait()
		expect(t, "of a caller that is gone", c.sizes())
	})
}

func TestACallYieldsToBusyOnes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCalls()
		var busy atomic.Bool
		const most = 2 * time.Second
		b := batch.New(8, 2, c.call).Yield(most, func(int) bool { return busy.Load() })
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go func() { _ = b.Run(ctx) }()
		send := func(n int) {
			for range n {
				go func() { _, _ = b.Do(ctx, 0) }()
				synctest.Wait()
			}
		}
		busy.Store(true)
		send(3)
		time.Sleep(most - time.Millisecond)
		synctest.Wait()
		expect(t, "beside busy ones", c.sizes())
		time.Sleep(time.Millisecond + 20*time.Millisecond)
		synctest.Wait()
		expect(t, "after the longest wait", c.sizes(), 3)
		c.goOn <- struct{}{}
		send(8)
		time.Sleep(20 * time.Millisecond)
		synctest.Wait()
		expect(t, "a full call", c.sizes(), 8)
		send(2)
		busy.Store(false)
		time.Sleep(20 * time.Millisecond)
		synctest.Wait()
		expect(t, "with nothing busy", c.sizes(), 2)
	})
}

func TestFullCallsYieldToBusyOnes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCalls()
		var busy atomic.Bool
		const most = 2 * time.Second
		b := batch.New(2, 4, c.call).Yield(most, func(int) bool { return busy.Load() }).EvenFull()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go func() { _ = b.Run(ctx) }()
		send := func(n int) {
			for range n {
				go func() { _, _ = b.Do(ctx, 0) }()
				synctest.Wait()
			}
		}
		busy.Store(true)
		send(3)
		time.Sleep(time.Second)
		send(3)
		synctest.Wait()
		expect(t, "beside busy ones", c.sizes())
		time.Sleep(time.Second + 20*time.Millisecond)
		synctest.Wait()
		expect(t, "after the longest wait of the first ones", c.sizes(), 2, 2)
		busy.Store(false)
		time.Sleep(20 * time.Millisecond)
		synctest.Wait()
		expect(t, "with nothing busy", c.sizes(), 2)
	})
}

func TestACallYieldsUntilItHasEnough(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCalls()
		b := batch.New(8, 2, c.call).Yield(time.Minute, func(waiting int) bool { return waiting < 3 })
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go func() { _ = b.Run(ctx) }()
		for n := range 3 {
			expect(t, fmt.Sprintf("with %d requests", n), c.sizes())
			go func() { _, _ = b.Do(ctx, 0) }()
			time.Sleep(time.Second)
			synctest.Wait()
		}
		expect(t, "with 3 requests", c.sizes(), 3)
	})
}

// TestAPostedRequestIsAnsweredWhereItsCallEnds checks that requests which are posted share a call with those whose
// callers wait, that each is answered once, a failure too, and that none is answered whose context ended before.
func TestAPostedRequestIsAnsweredWhereItsCallEnds(t *testing.T) {
	run(t, 0, func(t *testing.T, c *calls, b *batch.Batcher[int, int], send func(context.Context, int)) {
		t.Helper()
		type answer struct {
			req, res int
			err      error
		}
		var answers []answer
		post := func(ctx context.Context, req int) {
			b.Post(ctx, req, func(res int, err error) { answers = append(answers, answer{req, res, err}) })
			synctest.Wait()
		}
		send(t.Context(), 2) // the calls that both lanes have
		expect(t, "the first requests", c.sizes(), 1, 1)
		gone, leave := context.WithCancel(t.Context())
		post(gone, 7)
		post(t.Context(), 8)
		send(t.Context(), 1)
		leave()
		for range 3 {
			c.goOn <- struct{}{}
			synctest.Wait()
		}
		expect(t, "the posted one and the one that is waited for", c.sizes(), 2)
		if len(answers) != 1 || answers[0] != (answer{req: 8, res: 8}) {
			t.Errorf("answers %+v, want 8 for 8 alone", answers)
		}
		answers = nil
		post(t.Context(), 9)
		time.Sleep(time.Minute) // past what a call may take
		synctest.Wait()
		if len(answers) != 1 || answers[0].req != 9 || answers[0].err == nil {
			t.Errorf("answers %+v to a call that failed, want one error for 9", answers)
		}
	})
}

// TestAFailedCallIsReportedOnce checks that a call that fails is told once, with the number of its requests, and that
// one that is refused for its content is not.
func TestAFailedCallIsReportedOnce(t *testing.T) {
	for name, tt := range map[string]struct {
		err  error
		want []int
	}{
		"failed":  {errors.New("it is away"), []int{3}},
		"refused": {fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, ""), nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var reported []int
				b := batch.New(8, 1, func(context.Context, []int) ([]int, error) { return nil, tt.err }).
					Failed(func(requests int, _ error) { reported = append(reported, requests) })
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				answers := 0
				for i := range 3 {
					b.Post(ctx, i, func(_ int, err error) {
						if answers++; err == nil {
							t.Error("a request of a failed call succeeded")
						}
					})
				}
				go func() { ended <- b.Run(ctx) }()
				synctest.Wait()
				cancel()
				<-ended
				if answers != 3 || !slices.Equal(reported, tt.want) {
					t.Errorf("%d answers, told of %v", answers, reported)
				}
			})
		})
	}
}
