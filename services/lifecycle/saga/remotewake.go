package saga

import (
	"context"
	"time"

	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
)

// remoteWakeEvery bounds how often what other replicas did is looked for.
const remoteWakeEvery = 100 * time.Millisecond

// atRest reports whether no run is live, and other replicas tell this process when one is started.
func (c *Core) atRest(ctx context.Context) bool {
	c.driving.Lock()
	before := c.reserved
	c.driving.Unlock()
	resting := false
	if c.notified.Load().Listening() {
		live, err := pg.Value[bool](ctx, c.db, anyLive)
		resting = err == nil && !live
	}
	c.driving.Lock()
	defer c.driving.Unlock()
	resting = resting && c.reserved == before // a run that this process has begun meanwhile may not have been seen
	c.resting.Store(resting)
	return resting
}

// FollowRemoteWakes wakes the drivers of this process for what other replicas did, until ctx ends: soon after events were numbered, and not more than a few
// times a second, they look for runs to lease and for cancels of the runs in their hands. What it misses comes by the next poll or heartbeat.
func (c *Core) FollowRemoteWakes(ctx context.Context, numbered *events.Signal) error {
	c.notified.Store(numbered)
	for {
		woken := numbered.C() // before the look: what comes during the pause is looked for after it
		c.runnable.Notify()
		c.cancels.Notify()
		if !app.Sleep(ctx, remoteWakeEvery) {
			return nil
		}
		select {
		case <-woken:
		case <-ctx.Done():
			return nil
		}
	}
}
