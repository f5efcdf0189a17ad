package saga

import (
	"context"
	"time"

	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
)

// remoteWakeEvery is the least time between two wakes for events of other replicas.
const remoteWakeEvery = 100 * time.Millisecond

// NextPoll returns how long a driver that has just leased a number of runs may wait for a wake before it looks for
// others: poll, or longer while no run is live and this process is notified when another replica starts one. Without a
// live run nothing becomes due as time passes: each start comes with a wake, and the poll finds the runs whose wake was
// lost.
func (c *Core) NextPoll(ctx context.Context, leased int, poll time.Duration) time.Duration {
	if leased > 0 {
		c.resting.Store(false)
		return poll
	}
	if !c.atRest(ctx) {
		return poll
	}
	return c.notified.Load().Period(poll)
}

// Resting reports whether no run was live when a driver of this process last looked for runs, and none has been started
// here since.
func (c *Core) Resting() bool { return c.resting.Load() }

// atRest reports whether no run is live and this process is notified when another replica starts one. It does not ask
// again while nothing was notified since the answer that none is.
func (c *Core) atRest(ctx context.Context) bool {
	numbered := c.notified.Load()
	c.driving.Lock()
	before, news := c.reserved, c.news
	c.driving.Unlock()
	resting := numbered.Listening()
	if resting && !(c.resting.Load() && news != nil && !closed(news)) {
		news = numbered.C() // before the query, which may not see what is notified during it
		live, err := pg.Value[bool](ctx, c.db, anyLive)
		resting = err == nil && !live
	}
	c.driving.Lock()
	defer c.driving.Unlock()
	resting = resting && c.reserved == before // the query may not have seen a run that this process started meanwhile
	c.news = news
	c.resting.Store(resting)
	return resting
}

func closed(news <-chan struct{}) bool {
	select {
	case <-news:
		return true
	default:
		return false
	}
}

// FollowRemoteWakes wakes the drivers of this process for what other replicas did, until ctx ends: soon after events
// were numbered, and at most every remoteWakeEvery, they query for runs to lease and for cancels of the runs that they
// have leased. The next poll or heartbeat finds whatever this misses.
func (c *Core) FollowRemoteWakes(ctx context.Context, numbered *events.Signal) error {
	c.notified.Store(numbered)
	for {
		woken := numbered.C() // before the wakes: an event that comes during the pause wakes again after it
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
