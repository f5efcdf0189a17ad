package app

import (
	"context"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

// SignalError is the cancel cause after SIGINT or SIGTERM.
type SignalError struct{ Signal os.Signal }

func (e SignalError) Error() string { return "signal " + e.Signal.String() }

// Is makes a signal count as an ordinary shutdown.
//
// a sentinel compared by identity inside Is
func (e SignalError) Is(target error) bool { return target == ErrShutdown }

const (
	// RepeatGrace is how long after the first signal further signals are ignored. A supervisor that signals a process and
	// its group at once sends two, as does a person who presses Ctrl-C twice; neither of them asks to leave running what
	// the process has started.
	RepeatGrace = 5 * time.Second
	// ForceWithin is how long a forced stop may take to end what the process has started.
	ForceWithin = 10 * time.Second
	// forcedStatus is the exit status of a forced stop.
	forcedStatus = 130
)

// WithSignals returns a context that SIGINT or SIGTERM cancels with a SignalError as its cause. Signals within
// RepeatGrace of the first are ignored. A later one forces the stop: force ends what was started and removes what must
// not stay, within ForceWithin, and the process exits with status 130. The returned function releases the signals and
// waits for the watcher.
func WithSignals(
	parent context.Context, logger *slog.Logger, force ...func(context.Context) error,
) (context.Context, func()) {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	exit := os.Exit //nolint:forbidigo // a forced stop ends the process
	ctx, release := watchSignals(parent, logger, signals, exit, force...)
	return ctx, func() {
		// In this order: while a forced stop ends what was started, a further signal must not end the process before it.
		release()
		signal.Stop(signals)
	}
}

func watchSignals(
	parent context.Context, logger *slog.Logger, signals <-chan os.Signal, exit func(int),
	force ...func(context.Context) error,
) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(parent)
	quit := make(chan struct{})
	var watcher sync.WaitGroup
	watcher.Go(func() {
		select {
		case s := <-signals:
			logger.InfoContext(ctx, "signal received", slog.String("signal", s.String()))
			cancel(SignalError{Signal: s})
		case <-quit:
			return
		}
		if awaitForce(ctx, logger, signals, quit) {
			forceStop(context.WithoutCancel(ctx), logger, force)
			exit(forcedStatus)
		}
	})
	return ctx, sync.OnceFunc(func() {
		close(quit)
		watcher.Wait()
		cancel(ErrShutdown)
	})
}

// awaitForce waits for a signal that forces the stop, and reports false if the process ended its work before such a
// signal came.
func awaitForce(ctx context.Context, logger *slog.Logger, signals <-chan os.Signal, quit <-chan struct{}) bool {
	first, warned := time.Now(), false
	for {
		select {
		case s := <-signals:
			if time.Since(first) >= RepeatGrace {
				logger.WarnContext(ctx, "forced stop: ending everything that was started",
					slog.String("signal", s.String()))
				return true
			}
			if !warned {
				logger.WarnContext(ctx, "already stopping; a signal after the grace forces the stop",
					slog.String("signal", s.String()), slog.Duration("grace", RepeatGrace))
				warned = true
			}
		case <-quit:
			return false
		}
	}
}

// forceStop calls every function of force, even if others of them fail, and logs the error of each that failed.
func forceStop(ctx context.Context, logger *slog.Logger, force []func(context.Context) error) {
	ctx, cancel := context.WithTimeout(ctx, ForceWithin)
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, end := range force {
			if err := Protect(ctx, end); err != nil {
				logger.ErrorContext(ctx, "forced stop left something behind", slog.String("error", err.Error()))
			}
		}
	}()
	select {
	case <-done:
	case <-ctx.Done():
		logger.ErrorContext(ctx, "forced stop did not end in time")
	}
}
