package drive

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"time"

	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/lease"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// Reserve takes a free worker for a run that is being started, or returns false if none is free or the driver stops.
func (d *Driver) Reserve() (saga.Worker, bool) {
	if d.halt.Load() {
		return nil, false
	}
	select {
	case <-d.slots:
		return &ownLease{driver: d, sent: time.Now()}, true
	default:
		return nil, false
	}
}

// ownLease is a worker of a driver of this process that waits for a run which is being started: the transaction that
// inserts the run also leases it, so that it does not wait in the queue. If the transaction is rolled back, the worker
// is free again. If the outcome of the commit is not known, the run is made due at once, if it exists. If the process
// ends between the commit and the first step, the run stays leased until its lease ends, as any run whose driver dies.
type ownLease struct {
	driver *Driver
	sent   time.Time  // when the lease was requested: its local deadline counts from here
	leased *lease.Run // nil until the run is inserted
}

// Owner returns the owner of the lease.
func (o *ownLease) Owner() string { return o.driver.cfg.Owner }

// Length returns the length of the lease.
func (o *ownLease) Length() time.Duration { return o.driver.cfg.Lease }

// Hold stores the run that was inserted under the lease and returns its open attempt.
func (o *ownLease) Hold(run *runs.Run, def *saga.Definition, paused bool) *runs.Attempt {
	h := &lease.Run{Run: *run, Def: def, Outputs: map[string]json.RawMessage{}, Paused: paused}
	h.OpenNext()
	o.leased = h
	return &h.Attempt
}

// End hands the run to the driver, or gives the worker back.
func (o *ownLease) End(ctx context.Context, committed bool) {
	d := o.driver
	switch {
	case o.leased == nil:
		d.slots <- struct{}{}
	case committed && d.adopt(ctx, o):
	default:
		// tx was rolled back, or its outcome is unknown, or the driver stops: if the run exists, it is made due at once.
		go func() {
			defer func() { d.slots <- struct{}{} }()
			d.letGoUndriven(ctx, o.leased)
		}()
	}
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

// adopt drives a run that was started under this driver's lease. It returns false if the driver stops: the caller then
// makes the run due for others.
func (d *Driver) adopt(ctx context.Context, o *ownLease) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed || d.work == nil {
		return false
	}
	h, work := o.leased, d.work
	a := d.leases.Adopt(h, o.sent)
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
	return true
}
