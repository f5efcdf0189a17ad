package await

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/drill/kit/stage"
	"github.com/gpuaas/mesh/internal/app"
)

// Patience is how long a request is repeated whose answers are lost while a replica is replaced.
const Patience = time.Minute

// Limit is how long a condition before a fault or after its repair may take; it is no budget of the drill: the machine
// may be busy.
const Limit = 3 * time.Minute

// Sleep sleeps for as long as a fault is to last.
func Sleep(ctx context.Context, d time.Duration) error {
	if !app.Sleep(ctx, d) {
		return context.Cause(ctx)
	}
	return nil
}

// Took is how long a fault may take until the host shows it.
const Took = 3 * time.Second

// Check is how long one check of a condition may take: a server that accepts a connection and never answers must not
// keep a wait beyond its limit.
const Check = 30 * time.Second

// pause returns how long to wait between two checks after having waited so long: a fiftieth of that, from 50 to 250
// milliseconds.
func pause(waited time.Duration) time.Duration {
	return min(max(waited/50, 50*time.Millisecond), 250*time.Millisecond)
}

// Until checks again until do succeeds or limit has passed; then its error names the awaited condition, with the last
// error of do. Each check has a deadline of Check.
func Until(ctx context.Context, what string, limit time.Duration, do func(ctx context.Context) error) error {
	began := time.Now()
	for {
		err := check(ctx, do)
		if err == nil {
			return nil
		}
		if _, final := stage.Of(err); final {
			return err
		}
		if time.Since(began) > limit {
			return fmt.Errorf("waited %.1f s for %s: %w", time.Since(began).Seconds(), what, err)
		}
		if !app.Sleep(ctx, pause(time.Since(began))) {
			return fmt.Errorf("waited %.1f s for %s: %w", time.Since(began).Seconds(), what,
				errors.Join(context.Cause(ctx), err))
		}
	}
}

func check(ctx context.Context, do func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, Check)
	defer cancel()
	return do(ctx)
}
