package lease

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// loneBeats is how many heartbeats may wait for a locked row at once. Each has a connection of the pool while it waits.
const loneBeats = 4

// leaseMargin is how long before its granted end a lease is given up, at most: a tenth of the lease is enough.
const leaseMargin = 500 * time.Millisecond

// Run extends the leases until ctx ends, and ends the steps of runs that were cancelled or whose leases are lost.
func (k *Keeper) Run(ctx context.Context) {
	var loops sync.WaitGroup
	loops.Go(func() { k.heartbeats(ctx) })
	loops.Go(func() { k.cancels(ctx) })
	loops.Go(func() { k.watch(ctx) })
	loops.Wait()
}

// heartbeats extends all leases every Heartbeat.
func (k *Keeper) heartbeats(ctx context.Context) {
	ticker := time.NewTicker(k.terms.Heartbeat)
	defer ticker.Stop()
	var lone sync.WaitGroup
	defer lone.Wait()
	turns := make(chan struct{}, loneBeats)
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			skipped, err := k.beatOnce(ctx)
			if err != nil {
				k.beatFailed(ctx, err)
			}
			for _, a := range skipped {
				lone.Go(func() { k.beatAlone(ctx, a, turns) })
			}
		}
	}
}

// beatFailed counts and logs a heartbeat whose transaction failed. Whether the lease was extended is unknown, so that
// the steps go on until the lease's local deadline.
func (k *Keeper) beatFailed(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	k.core.Stats().BeatErrors.Add(1)
	k.log.WarnContext(ctx, "heartbeat failed", slog.String("error", err.Error()))
}

// beatAlone extends the lease of one run whose row was locked when the others were extended, unless an earlier
// heartbeat still waits for that row. A heartbeat waits for at most half of Heartbeat and then gives its place to the
// next.
func (k *Keeper) beatAlone(ctx context.Context, a *Activity, turns chan struct{}) {
	if !a.beating.CompareAndSwap(false, true) {
		return
	}
	defer a.beating.Store(false)
	select {
	case turns <- struct{}{}:
	case <-ctx.Done():
		return
	}
	defer func() { <-turns }()
	call, cancel := context.WithTimeout(ctx, k.terms.Heartbeat/2)
	defer cancel()
	if err := k.beatOne(call, a.id, a); err != nil {
		k.beatFailed(ctx, err)
	}
}

// cancels queries for cancelled runs whenever it is notified of a cancel, in this process or in another replica. It
// does not wait for the next heartbeat.
func (k *Keeper) cancels(ctx context.Context) {
	heard := k.core.Cancels().C()
	for {
		select {
		case <-ctx.Done():
			return
		case <-heard:
			heard = k.core.Cancels().C() // before the query: a cancel that comes during it is found by the next query
			if err := k.findCancels(ctx); err != nil && ctx.Err() == nil {
				k.log.WarnContext(ctx, "look for cancels failed", slog.String("error", err.Error()))
			}
		}
	}
}

// watch gives up leases whose local deadline has come.
func (k *Keeper) watch(ctx context.Context) {
	ticker := time.NewTicker(min(250*time.Millisecond, k.terms.Length/8))
	defer ticker.Stop()
	margin := min(leaseMargin, k.terms.Length/10)
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			for _, a := range k.All() {
				a.mu.Lock()
				over := !a.dead && time.Until(a.deadline) < margin
				a.mu.Unlock()
				if over {
					k.log.WarnContext(ctx, "lease ended without an answer to its heartbeat", slog.String("workflow_id", a.id))
					a.Lose(saga.ErrFenced)
				}
			}
		}
	}
}

// beatOnce extends the leases of all runs of this driver in one statement, and returns those that the statement did not
// extend: their rows are locked at that moment, mostly by their own advance, or have another fence, or are parked.
func (k *Keeper) beatOnce(ctx context.Context) ([]*Activity, error) {
	held := map[string]*Activity{}
	var runIDs []string
	var fences []int64
	for _, a := range k.All() {
		a.mu.Lock()
		if !a.dead {
			held[a.id] = a
			runIDs, fences = append(runIDs, a.id), append(fences, a.fence)
		}
		a.mu.Unlock()
	}
	if len(runIDs) == 0 {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, k.terms.Heartbeat)
	defer cancel()
	sent := time.Now()
	var leased []runs.Run
	err := pg.InTx(ctx, k.core.DB(), func(ctx context.Context, tx pgx.Tx) error {
		var err error
		leased, err = pg.All[runs.Run](ctx, tx, beatRuns, runIDs, fences, k.terms.Owner, k.terms.Length.Seconds())
		if err != nil {
			return fmt.Errorf("extend leases: %w", err)
		}
		if len(leased) == 0 {
			return nil
		}
		var buffer runs.Buffer
		alive := make([]string, 0, len(leased))
		for i := range leased {
			alive = append(alive, leased[i].ID)
			buffer.Run(&leased[i])
		}
		if err := runs.KeepOpen(ctx, tx, alive...); err != nil {
			return err
		}
		steps, err := runs.ChangeAttempts(ctx, tx, beatSteps, alive)
		if err != nil {
			return err
		}
		for i := range steps {
			buffer.Attempt(&steps[i])
		}
		return buffer.Flush(ctx, tx)
	})
	if err != nil {
		return nil, err
	}
	k.core.Appended().Notify()
	for i := range leased {
		held[leased[i].ID].extended(sent.Add(k.terms.Length), leased[i].CancelAt != nil)
		delete(held, leased[i].ID)
	}
	return slices.Collect(maps.Values(held)), nil
}

func (k *Keeper) beatOne(ctx context.Context, id string, a *Activity) error {
	a.mu.Lock()
	fence := a.fence
	a.mu.Unlock()
	sent := time.Now()
	cancelled, err := pg.Value[bool](ctx, k.core.DB(), beatRun, id, fence, k.terms.Owner, k.terms.Length.Seconds())
	if err == nil {
		a.extended(sent.Add(k.terms.Length), cancelled)
		return nil
	}
	if !pg.IsNoRows(err) {
		return fmt.Errorf("extend lease: %w", err)
	}
	mine, err := pg.Value[bool](ctx, k.core.DB(), ownsRun, id, k.terms.Owner)
	if err != nil {
		return fmt.Errorf("look at lease: %w", err)
	}
	k.mu.Lock()
	still := k.active[id] == a
	k.mu.Unlock()
	if still && !mine {
		a.Lose(saga.ErrFenced)
	}
	return nil
}

// findCancels reads which of this driver's runs have been cancelled, without extending their leases, so that a Cancel
// ends the step's context soon. The next heartbeat finds the cancels that it misses.
func (k *Keeper) findCancels(ctx context.Context) error {
	held := map[string]*Activity{}
	var runIDs []string
	for _, a := range k.All() {
		a.mu.Lock()
		if !a.dead && !a.cancelAt && !a.undoing {
			held[a.id] = a
			runIDs = append(runIDs, a.id)
		}
		a.mu.Unlock()
	}
	if len(runIDs) == 0 {
		return nil
	}
	cancelled, err := pg.Values[string](ctx, k.core.DB(), cancelledRuns, runIDs)
	if err != nil {
		return fmt.Errorf("look for cancels: %w", err)
	}
	for _, id := range cancelled {
		held[id].cancelled()
	}
	return nil
}
