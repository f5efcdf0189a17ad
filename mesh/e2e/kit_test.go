package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/testkit"
)

// test is one test with a limit of its own, far below that of the package: a test that hangs fails alone.
type test struct {
	*testing.T

	ctx    context.Context
	cancel context.CancelCauseFunc
	end    time.Time
}

// within limits a test. Its context ends early when a process of its mesh cannot live.
func within(t *testing.T, limit time.Duration) test {
	t.Helper()
	testkit.IO(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	timed, stop := context.WithTimeoutCause(ctx, limit, fmt.Errorf("the limit of %s, %s, has passed", t.Name(), limit))
	began := time.Now()
	t.Cleanup(func() {
		stop()
		cancel(nil)
		t.Logf("%s took %.1f s of its %s", t.Name(), time.Since(began).Seconds(), limit)
	})
	return test{T: t, ctx: timed, cancel: cancel, end: began.Add(limit)}
}

// beside is within for a test that checks no times of processes, and so may share the machine with another one: most of
// what these tests do is wait.
func beside(t *testing.T, limit time.Duration) test {
	t.Helper()
	t.Parallel()
	return within(t, limit)
}

// run is a part of the test, under its limit.
func (t test) run(name string, f func(t test)) {
	t.Helper()
	t.Run(name, func(part *testing.T) {
		f(test{T: part, ctx: t.ctx, cancel: t.cancel, end: t.end})
	})
}

// Context returns a context that ends with the test, at its limit, or when its mesh is broken.
func (t test) Context() context.Context { return t.ctx }

// Deadline returns the test's own deadline.
func (t test) Deadline() (time.Time, bool) { return t.end, true }

// insist repeats do until it succeeds or limit has passed; then the error names the awaited condition, and the last
// error of do.
func insist(ctx context.Context, what string, limit time.Duration, do func(ctx context.Context) error) error {
	began := time.Now()
	for {
		err := do(ctx)
		if err == nil {
			return nil
		}
		if time.Since(began) > limit {
			return fmt.Errorf("waited %s for %s: %w", limit, what, err)
		}
		if !app.Sleep(ctx, 4*testkit.Pause(time.Since(began))) {
			return fmt.Errorf("waited %.1f s of %s for %s: %w", time.Since(began).Seconds(), limit, what,
				errors.Join(context.Cause(ctx), err))
		}
	}
}

// patience is how long a test waits for anything on a machine that is busy with other packages. A budget is measured
// and compared, not waited for.
const patience = 3 * time.Minute

// must ends the test where insist fails, which asks for a few minutes at least.
func (t test) must(what string, limit time.Duration, do func(ctx context.Context) error) {
	t.Helper()
	if err := insist(t.ctx, what, max(limit, patience), do); err != nil {
		t.Fatal(err)
	}
}

// want fails the test where must would end it, and lets it go on.
func (t test) want(what string, limit time.Duration, do func(ctx context.Context) error) {
	t.Helper()
	if err := insist(t.ctx, what, max(limit, patience), do); err != nil {
		t.Error(err)
	}
}
