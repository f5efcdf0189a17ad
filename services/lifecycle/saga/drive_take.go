package saga

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// leaseOnce takes up to limit runs. If a batch fails for a reason that is not the connection, the runs are taken one by
// one, and the one that fails is put into quarantine.
func (d *Driver) leaseOnce(ctx context.Context, limit int) ([]*activity, error) {
	skip := d.poisoned()
	got, err := d.take(ctx, limit, skip)
	if err == nil || pg.IsConnError(err) || ctx.Err() != nil || errors.Is(err, pg.ErrCommitUnknown) {
		return got, err
	}
	for range limit {
		one, oneErr := d.take(ctx, 1, skip)
		bad, ok := errors.AsType[*unreadableError](oneErr)
		switch {
		case oneErr == nil && len(one) == 0:
			return got, nil
		case oneErr == nil:
			got = append(got, one...)
		case ok && bad.runID != "":
			skip = append(skip, bad.runID)
			d.isolate(ctx, bad)
		default:
			return got, oneErr
		}
	}
	return got, nil
}

func (d *Driver) take(ctx context.Context, limit int, skip []string) ([]*activity, error) {
	sent := time.Now()
	leased, bad, err := d.core.lease(ctx, d.cfg.Owner, d.cfg.Lease, limit, skip)
	for _, b := range bad {
		d.isolate(ctx, b)
	}
	if err != nil {
		return nil, err
	}
	out := make([]*activity, 0, len(leased))
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, h := range leased {
		a := &activity{
			id: h.run.ID, h: h, fence: h.run.Fence, deadline: sent.Add(d.cfg.Lease),
			cancelAt: h.run.CancelAt != nil, undoing: h.run.Phase == runs.Undo,
		}
		d.active[h.run.ID] = a
		out = append(out, a)
	}
	return out, nil
}

func (d *Driver) isolate(ctx context.Context, bad *unreadableError) {
	d.log.ErrorContext(ctx, "run is unreadable and put aside", slog.String("workflow_id", bad.runID),
		slog.String("error", bad.err.Error()))
	if err := d.core.quarantine(ctx, bad.runID, bad.err.Error()); err != nil {
		d.log.ErrorContext(ctx, "run not put aside", slog.String("workflow_id", bad.runID), slog.String("error", err.Error()))
		d.mu.Lock()
		d.poison[bad.runID] = time.Now().Add(time.Minute)
		d.mu.Unlock()
	}
}

func (d *Driver) poisoned() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var out []string
	for id, until := range d.poison {
		if time.Now().After(until) {
			delete(d.poison, id)
			continue
		}
		out = append(out, id)
	}
	return out
}

// forget removes a run from this driver's active runs.
func (d *Driver) forget(a *activity) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.active[a.id] == a {
		delete(d.active, a.id)
	}
}

func (d *Driver) snapshot() []*activity {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := make([]*activity, 0, len(d.active))
	for _, a := range d.active {
		out = append(out, a)
	}
	return out
}
