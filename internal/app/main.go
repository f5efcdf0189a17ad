package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"
)

// SignalError is the cancel cause after SIGINT or SIGTERM.
type SignalError struct{ Signal os.Signal }

func (e SignalError) Error() string { return "signal " + e.Signal.String() }

// Is makes a signal count as an ordinary shutdown.
func (e SignalError) Is(target error) bool { return target == ErrShutdown } //nolint:errorlint // a sentinel compared by identity inside Is

// WithSignals answers a context that SIGINT or SIGTERM cancels with a SignalError as its cause. A second signal ends the process at once with
// status 130. The returned function releases the signals and waits for the watcher.
func WithSignals(parent context.Context, logger *slog.Logger) (context.Context, func()) {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	ctx, release := watchSignals(parent, logger, signals, os.Exit) //nolint:forbidigo // a second signal means now
	return ctx, func() {
		signal.Stop(signals)
		release()
	}
}

func watchSignals(parent context.Context, logger *slog.Logger, signals <-chan os.Signal, exit func(int)) (context.Context, func()) {
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
		select {
		case s := <-signals:
			logger.WarnContext(ctx, "second signal, exiting at once", slog.String("signal", s.String()))
			exit(130)
		case <-quit:
		}
	})
	return ctx, sync.OnceFunc(func() {
		close(quit)
		watcher.Wait()
		cancel(ErrShutdown)
	})
}

// Main runs a process's body under WithSignals and answers its exit status: 0 after a clean end, also one that a signal asked for, else 1.
func Main(ctx context.Context, logger *slog.Logger, run func(ctx context.Context) error) int {
	sigCtx, release := WithSignals(ctx, logger)
	defer release()
	err := protect(sigCtx, run)
	if err == nil || (sigCtx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, ErrShutdown))) {
		return 0
	}
	logger.ErrorContext(sigCtx, "process failed", slog.String("error", fmt.Sprint(err)))
	return 1
}
