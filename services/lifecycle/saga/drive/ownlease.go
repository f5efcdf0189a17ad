package drive

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"time"

	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/lease"
)

// Reserve takes a free worker for a run that is being started, or returns nil if none is free or the driver stops.
func (d *Driver) Reserve() *saga.Worker {
	if d.halt.Load() {
		return nil
	}
	select {
	case <-d.slots:
		return &saga.Worker{Owner: d.cfg.Owner, Length: d.cfg.Lease, Sent: time.Now()}
	default:
		return nil
	}
}

// DriveOrFree drives the run that was started under this driver's lease, or frees the worker if none was inserted. If
// the outcome of the transaction is unknown, or the driver stops, the run is made due at once, if it exists, and the
// worker is freed.
func (d *Driver) DriveOrFree(ctx context.Context, own *saga.Worker, committed bool) {
	if own.Run == nil {
		d.slots <- struct{}{}
		return
	}
	h := &lease.Run{Run: *own.Run, Def: own.Def, Outputs: map[string]json.RawMessage{}, Paused: own.Paused}
	h.OpenNext()
	d.mu.Lock()
	defer d.mu.Unlock()
	if !committed || d.closed || d.work == nil {
		go func() {
			defer func() { d.slots <- struct{}{} }()
			d.letGoUndriven(ctx, h)
		}()
		return
	}
	a, work := d.leases.Adopt(h, own.Sent), d.work
	d.steps.Go(func() {
		defer func() { d.slots <- struct{}{} }()
		if err := errors.Join(d.core.Observe(ctx, "lease.opened", h.Place()),
			d.core.Point(ctx, "lease.after_commit", h.Place())); err != nil {
			d.leases.Forget(a)
			d.log.WarnContext(ctx, "run dropped until its lease ends", slog.String("workflow_id", h.Run.ID),
				slog.String("error", err.Error()))
			return
		}
		d.drive(work, a)
	})
}

// letGoWithin bounds the time for letting go of a run that no driver drives; otherwise its lease ends by itself.
const letGoWithin = 30 * time.Second

// letGoUndriven makes a run that this driver has leased and does not drive due at once, if it exists.
func (d *Driver) letGoUndriven(ctx context.Context, h *lease.Run) {
	ctx, cancel := context.WithTimeout(ctx, letGoWithin)
	defer cancel()
	had, err := d.leases.LetGo(ctx, h)
	switch {
	case err != nil:
		d.log.WarnContext(ctx, "run not let go of before its lease ends", slog.String("workflow_id", h.Run.ID),
			slog.String("error", err.Error()))
	case had:
		d.core.Runnable().Notify()
	}
}
