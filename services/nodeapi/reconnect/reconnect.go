// Package reconnect keeps a stream to another service.
package reconnect

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"time"
)

// Keep follows a stream with once until ctx ends, again with jitter whenever once returns; lost is the warning of that.
// The pauses grow up to two seconds, and begin anew after a stream that stood for five.
func Keep(ctx context.Context, logger *slog.Logger, lost string, once func(context.Context) error) error {
	failures := 0
	for {
		began := time.Now()
		err := once(ctx)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // asked to stop
		}
		if time.Since(began) > 5*time.Second {
			failures = 0
		}
		failures++
		logger.WarnContext(ctx, lost, slog.Int("failures", failures), slog.Any("error", err))
		pause := min(time.Duration(failures)*100*time.Millisecond, 2*time.Second)
		select {
		case <-time.After(pause/2 + rand.N(pause)): //nolint:gosec // jitter
		case <-ctx.Done():
			return nil
		}
	}
}
