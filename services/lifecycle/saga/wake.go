package saga

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
)

// makesDue wakes the drivers of this process once tx, in which a run became due, is committed. If tx takes no end hook,
// Committed wakes them instead, after this and every later commit.
func (c *Core) makesDue(tx pgx.Tx) {
	hooked := pg.OnEnd(tx, func(committed bool) {
		if committed {
			c.runnable.Notify()
		}
	})
	if !hooked {
		c.unheard.Store(true)
	}
}

// remoteWakeEvery is the least time between two wakes for events of other replicas.
const remoteWakeEvery = 100 * time.Millisecond

// atRest reports whether no run is live and this process is notified when another replica starts one.
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
	resting = resting && c.reserved == before // the query may not have seen a run that this process started meanwhile
	c.resting.Store(resting)
	return resting
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

// Wake signals these runs: a parked run that can be woken becomes due at once, and a leased run that parks with
// WakeOnSignal is due again at once. It never takes a lease from a driver. The caller calls it in the transaction of
// the change that the runs wait for, as its last lock, and calls Committed after the commit.
func (c *Core) Wake(ctx context.Context, tx pgx.Tx, runIDs ...string) error {
	return c.wake(ctx, tx, wakeRuns, runIDs)
}

// WakeWorkspaces is Wake for the open runs of these workspaces.
func (c *Core) WakeWorkspaces(ctx context.Context, tx pgx.Tx, workspaceIDs ...string) error {
	return c.wake(ctx, tx, wakeRunsOfWorkspaces, workspaceIDs)
}

func (c *Core) wake(ctx context.Context, tx pgx.Tx, change *pg.Statement, ids []string) error {
	if len(ids) == 0 {
		return nil
	}
	if _, err := pg.Exec(ctx, tx, change, ids); err != nil {
		return fmt.Errorf("wake runs: %w", err)
	}
	c.makesDue(tx)
	return nil
}

// wakeSQL wakes the runs whose column is one of $1.
func wakeSQL(column string) string {
	return `
		WITH due AS (SELECT r.id FROM lifecycle.saga_run r WHERE r.` + column + ` = ANY ($1::uuid[])
			AND r.state IN ('pending', 'running', 'waiting', 'compensating') ORDER BY r.id FOR NO KEY UPDATE)
		UPDATE lifecycle.saga_run r SET signal = r.signal + 1,
			next_at = CASE WHEN r.owner IS NULL AND r.wakeable THEN LEAST(r.next_at, mesh.clock()) ELSE r.next_at END
		FROM due WHERE r.id = due.id`
}
