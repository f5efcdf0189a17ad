package lease

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

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

func (k *Keeper) take(ctx context.Context, limit int, skip []string) ([]*Activity, error) {
	sent := time.Now()
	leased, bad, err := k.lease(ctx, limit, skip)
	for _, b := range bad {
		k.isolate(ctx, b)
	}
	if err != nil {
		return nil, err
	}
	out := make([]*Activity, 0, len(leased))
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, h := range leased {
		a := &Activity{
			Leased: h, id: h.Run.ID, fence: h.Run.Fence, deadline: sent.Add(k.terms.Length),
			cancelAt: h.Run.CancelAt != nil, undoing: h.Run.Phase == runs.Undo,
		}
		k.active[h.Run.ID] = a
		out = append(out, a)
	}
	return out, nil
}

// Adopt adds the lease of a run that was started under it. sent is when the lease was requested.
func (k *Keeper) Adopt(h *Run, sent time.Time) *Activity {
	a := &Activity{Leased: h, id: h.Run.ID, fence: h.Run.Fence, deadline: sent.Add(k.terms.Length)}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.active[a.id] = a
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
