package lease

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// Terms are the terms of the leases of one driver.
type Terms struct {
	Owner     string
	Length    time.Duration // without a heartbeat
	Heartbeat time.Duration // how often all leases are extended
}

// Keeper has the leases of one driver: it takes, extends and loses them.
type Keeper struct {
	core  *saga.Core
	terms Terms
	log   *slog.Logger

	mu     sync.Mutex
	active map[string]*Activity // by run
	poison map[string]time.Time // runs not to be leased before that time
}

// NewKeeper returns a keeper without a lease.
func NewKeeper(core *saga.Core, terms Terms, log *slog.Logger) *Keeper {
	return &Keeper{
		core: core, terms: terms, log: log, active: map[string]*Activity{}, poison: map[string]time.Time{},
	}
}

// Take leases up to limit runs that are due. If a batch fails for a reason that is not the connection, the runs are
// taken one by one, and the one that fails is put into quarantine.
func (k *Keeper) Take(ctx context.Context, limit int) ([]*Activity, error) {
	skip := k.poisoned()
	got, err := k.take(ctx, limit, skip)
	if err == nil || pg.IsConnError(err) || ctx.Err() != nil || errors.Is(err, pg.ErrCommitUnknown) {
		return got, err
	}
	for range limit {
		one, oneErr := k.take(ctx, 1, skip)
		bad, ok := errors.AsType[*unreadableError](oneErr)
		switch {
		case oneErr == nil && len(one) == 0:
			return got, nil
		case oneErr == nil:
			got = append(got, one...)
		case ok && bad.runID != "":
			skip = append(skip, bad.runID)
			k.isolate(ctx, bad)
		default:
			return got, oneErr
		}
	}
	return got, nil
}

// take leases up to limit runs that are due, in one transaction: it closes the attempts that their former drivers left
// open as lost, resumes parked attempts and opens the next attempt of the other runs. Leased runs that cannot be driven
// are put into quarantine.
func (k *Keeper) take(ctx context.Context, limit int, skip []string) ([]*Activity, error) {
	sent := time.Now()
	var leased []*Run
	var bad []*unreadableError
	err := pg.InTx(ctx, k.core.DB(), func(ctx context.Context, tx pgx.Tx) error {
		var err error
		if leased, bad, err = k.leaseRows(ctx, tx, limit, skip); err != nil {
			return err
		}
		if err := loseUnreadable(ctx, tx, bad); err != nil || len(leased) == 0 {
			return err
		}
		return k.openAttempts(ctx, tx, leased)
	})
	if err != nil {
		return nil, err
	}
	if len(leased)+len(bad) > 0 {
		k.core.Appended().Notify()
	}
	for _, one := range bad {
		k.isolate(ctx, one)
	}
	if len(leased) == 0 {
		return nil, nil
	}
	for _, h := range leased {
		if err := k.core.Observe(ctx, "lease.opened", h.Place()); err != nil {
			return nil, err
		}
	}
	if err := k.core.Point(ctx, "lease.after_commit", leased[0].Place()); err != nil {
		return nil, err
	}
	out := make([]*Activity, 0, len(leased))
	for _, h := range leased {
		out = append(out, k.Adopt(h, sent))
	}
	return out, nil
}

// Adopt adds the lease of a run. sent is when the lease was requested. If the keeper has an earlier lease of the run,
// which has ended unnoticed, that one is lost: its step's context ends, as no heartbeat of it will be refused.
func (k *Keeper) Adopt(h *Run, sent time.Time) *Activity {
	a := &Activity{
		Leased: h, id: h.Run.ID, fence: h.Run.Fence, deadline: sent.Add(k.terms.Length),
		cancelAt: h.Run.CancelAt != nil, undoing: h.Run.Phase == runs.Undo,
	}
	k.mu.Lock()
	former := k.active[a.id]
	k.active[a.id] = a
	k.mu.Unlock()
	if former != nil {
		former.Lose(saga.ErrFenced)
	}
	k.core.Stats().Leased.Add(1)
	return a
}

func (k *Keeper) isolate(ctx context.Context, bad *unreadableError) {
	k.log.ErrorContext(ctx, "run is unreadable and put aside", slog.String("workflow_id", bad.runID),
		slog.String("error", bad.err.Error()))
	if err := k.quarantine(ctx, bad.runID, bad.err.Error()); err != nil {
		k.log.ErrorContext(ctx, "run not put aside", slog.String("workflow_id", bad.runID), slog.String("error", err.Error()))
		k.mu.Lock()
		k.poison[bad.runID] = time.Now().Add(time.Minute)
		k.mu.Unlock()
	}
}

// poisoned returns the runs that are not to be leased now.
func (k *Keeper) poisoned() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	var out []string
	for id, until := range k.poison {
		if time.Now().After(until) {
			delete(k.poison, id)
			continue
		}
		out = append(out, id)
	}
	return out
}

// Forget removes a run from the leases.
func (k *Keeper) Forget(a *Activity) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.active[a.id] == a {
		delete(k.active, a.id)
	}
}

// All returns the leased runs.
func (k *Keeper) All() []*Activity {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := make([]*Activity, 0, len(k.active))
	for _, a := range k.active {
		out = append(out, a)
	}
	return out
}

// Len returns how many runs are leased.
func (k *Keeper) Len() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.active)
}
