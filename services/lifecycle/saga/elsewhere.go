package saga

import (
	"context"
	"time"

	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/events"
)

// elsewhereEvery bounds how often what other replicas did is looked for.
const elsewhereEvery = 100 * time.Millisecond

// FollowElsewhere wakes the drivers of this process for what other replicas did, until ctx ends: soon after events were numbered, and not more than a few
// times a second, they look for runs to lease and for cancels of the runs in their hands. What it misses comes by the next poll or heartbeat.
func (c *Core) FollowElsewhere(ctx context.Context, numbered *events.Signal) error {
	for {
		woken := numbered.C() // before the look: what comes during the pause is looked for after it
		c.runnable.Notify()
		c.cancels.Notify()
		if !app.Sleep(ctx, elsewhereEvery) {
			return nil
		}
		select {
		case <-woken:
		case <-ctx.Done():
			return nil
		}
	}
}
