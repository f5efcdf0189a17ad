package saga

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// ownLease is a worker of a driver of this process that waits for a run which is being started: the transaction that
// inserts the run also leases it, so that it does not wait in the queue. If the transaction is rolled back, the worker
// is free again. If the outcome of the commit is not known, the run is made due at once, if it exists. If the process
// ends between the commit and the first step, the run stays leased until its lease ends, as any run whose driver dies.
type ownLease struct {
	driver *Driver
	sent   time.Time  // when the lease was requested: its local deadline counts from here
	leased *leasedRun // nil until the run is inserted
}

// owner and length are the owner and the seconds of the lease in the statement; an empty owner leaves the run in the
// queue.
func (o *ownLease) owner() string {
	if o == nil {
		return ""
	}
	return o.driver.cfg.Owner
}

func (o *ownLease) length() float64 {
	if o == nil {
		return 0
	}
	return o.driver.cfg.Lease.Seconds()
}

// hold stores the run that was inserted under the lease and returns its open attempt.
func (o *ownLease) hold(run *runs.Run, def *Definition, paused bool) *runs.Attempt {
	h := &leasedRun{run: *run, def: def, outputs: map[string]json.RawMessage{}, paused: paused, runLeft: noDeadline}
	if run.DeadlineAt != nil && run.OpenSince != nil {
		h.runLeft = run.DeadlineAt.Sub(*run.OpenSince)
	}
	h.overdue = h.runLeft <= 0
	h.openIn()
	o.leased = h
	return &h.attempt
}

// end hands the run to the driver, or gives the worker back.
func (o *ownLease) end(ctx context.Context, committed bool) {
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
func (d *Driver) letGoUndriven(ctx context.Context, h *leasedRun) {
	ctx, cancel := context.WithTimeout(ctx, letGoWithin)
	defer cancel()
	tag, err := pg.Exec(ctx, d.core.db, letGoRun, h.run.ID, h.run.Fence, d.cfg.Owner)
	switch {
	case err != nil:
		d.log.WarnContext(ctx, "run not let go of before its lease ends", slog.String("workflow_id", h.run.ID),
			slog.String("error", err.Error()))
	case tag.RowsAffected() > 0:
		d.core.runnable.Notify()
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
	a := &activity{id: h.run.ID, h: h, fence: h.run.Fence, deadline: o.sent.Add(d.cfg.Lease)}
	d.active[a.id] = a
	d.core.stats.Leased.Add(1)
	d.steps.Go(func() {
		defer func() { d.slots <- struct{}{} }()
		if err := errors.Join(d.core.observe(ctx, "lease.opened", h.place()),
			d.core.point(ctx, "lease.after_commit", h.place())); err != nil {
			d.forget(a)
			d.log.WarnContext(ctx, "run dropped until its lease ends", slog.String("workflow_id", a.id),
				slog.String("error", err.Error()))
			return
		}
		d.drive(work, a)
	})
	return true
}
