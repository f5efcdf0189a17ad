package app

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"time"
)

// Backoff is how long Supervise waits before it starts again: Min doubled at each failure in a row up to Max, with full
// jitter above Min. A run that lasted at least Reset starts the count anew. Zero values mean 100 ms, 30 s and 1 min.
type Backoff struct {
	Min, Max, Reset time.Duration
}

// Supervise calls run again and again until ctx ends, and then returns nil. Whenever run returns before that, with nil
// or an error, or panics, Supervise logs it, waits for the backoff and calls run again. For child processes; a loop of
// this process should fail its group instead.
func Supervise(ctx context.Context, logger *slog.Logger, name string, backoff Backoff,
	run func(ctx context.Context) error,
) error {
	if backoff.Min <= 0 {
		backoff.Min = 100 * time.Millisecond
	}
	if backoff.Max < backoff.Min {
		backoff.Max = max(30*time.Second, backoff.Min)
	}
	if backoff.Reset <= 0 {
		backoff.Reset = time.Minute
	}
	failures := 0
	for ctx.Err() == nil {
		begin := time.Now()
		err := Protect(ctx, run)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // the end of the context explains it
		}
		if time.Since(begin) >= backoff.Reset {
			failures = 0
		}
		if err == nil {
			err = errors.New("ended although it was not asked to")
		}
		delay := backoff.delay(failures)
		failures++
		logger.WarnContext(ctx, "supervised task ended, starting it again", slog.String("task", name),
			slog.Int("failures", failures),
			slog.Duration("delay", delay), slog.String("error", err.Error()))
		Sleep(ctx, delay)
	}
	return nil
}

func (b Backoff) delay(failures int) time.Duration {
	ceiling := b.Max
	if failures < 30 {
		ceiling = min(b.Max, b.Min<<failures)
	}
	if ceiling <= b.Min {
		return b.Min
	}
	return b.Min + rand.N(ceiling-b.Min) // jitter needs no secrecy
}

// Every calls fn at once and then each interval (plus or minus a tenth, so that replicas do not run at the same
// moments) until ctx ends, and returns nil. An error is logged and does not end the loop; a panic does, as an error.
func Every(ctx context.Context, logger *slog.Logger, name string, interval time.Duration,
	fn func(ctx context.Context) error,
) error {
	return EveryPaced(ctx, logger, name, func() func(context.Context) bool {
		return func(ctx context.Context) bool {
			wait := interval
			if tenth := interval / 10; tenth > 0 {
				wait += rand.N(2*tenth) - tenth // jitter needs no secrecy
			}
			return Sleep(ctx, wait)
		}
	}, fn)
}

// EveryPaced is Every with a pause that the caller chooses: EveryPaced calls before ahead of each round, and after the
// round calls the function that before returned, which sleeps and reports whether ctx is still alive.
func EveryPaced(ctx context.Context, logger *slog.Logger, name string, before func() func(context.Context) bool,
	fn func(ctx context.Context) error,
) error {
	for {
		pause := before()
		if err := Protect(ctx, fn); err != nil {
			if _, panicked := errors.AsType[*PanicError](err); panicked {
				return err
			}
			if ctx.Err() != nil {
				return nil //nolint:nilerr // the end of the context explains it
			}
			logger.WarnContext(ctx, "loop round failed", slog.String("loop", name), slog.String("error", err.Error()))
		}
		if !pause(ctx) {
			return nil
		}
	}
}

// Sleep waits for d and returns true, or returns false as soon as ctx ends.
func Sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
