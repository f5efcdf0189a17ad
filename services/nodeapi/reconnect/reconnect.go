// Package reconnect keeps a stream to another service.
package reconnect

import (
	"context"
	"math/rand/v2"
	"time"
)

// Keep follows a stream with once until ctx ends, again with jitter whenever once returns; lost is called first, with
// how often it failed in a row. The pauses grow up to two seconds, and begin anew after a stream that stood for five.
func Keep(ctx context.Context, once func(context.Context) error, lost func(failures int, err error)) error {
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
		lost(failures, err)
		pause := min(time.Duration(failures)*100*time.Millisecond, 2*time.Second)
		select {
		case <-time.After(pause/2 + rand.N(pause)):
		case <-ctx.Done():
			return nil
		}
	}
}
