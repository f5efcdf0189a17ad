package drive

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/lease"
	"github.com/gpuaas/mesh/services/lifecycle/saga/stall"
)

// Driver leases runs and executes their steps. Any number of drivers may work on one database.
type Driver struct {
	core        *saga.Core
	leases      *lease.Keeper
	cfg         Config
	log         *slog.Logger
	slots       chan struct{} // one token per free worker
	transitions chan *transition

	gathering sync.Mutex // locked by the committer that gathers transitions

	halt  atomic.Bool // the driver is stopping: open attempts are parked
	gone  atomic.Bool // the driver ends as a crash would
	steps sync.WaitGroup

	mu sync.Mutex
	//nolint:containedctx // of the steps, while it runs: runs that are started under its lease come from elsewhere
	work   context.Context
	closed bool   // the driver takes no further run
	dues   agenda // retries that this driver knows of
}

// committers is how many transactions of a driver's transitions are under way at once: while one waits for its flush,
// the next gathers and writes.
const committers = 2

// leaseGather is how long a driver that has just leased something waits before it leases again, so that runs that
// become due together are leased together. A run that becomes due alone does not wait.
const leaseGather = 2 * time.Millisecond

// New makes a driver of core.
func New(core *saga.Core, cfg Config) (*Driver, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("configure saga driver: %w", err)
	}
	cfg = config.Or(cfg, Default())
	log := core.Logger().With(slog.String("owner", cfg.Owner))
	terms := lease.Terms{Owner: cfg.Owner, Length: cfg.Lease, Heartbeat: cfg.Heartbeat}
	d := &Driver{
		core: core, leases: lease.NewKeeper(core, terms, log), cfg: cfg, log: log,
		slots:       make(chan struct{}, cfg.Workers),
		transitions: make(chan *transition, cfg.Workers),
	}
	for range cfg.Workers {
		d.slots <- struct{}{}
	}
	return d, nil
}

// Run drives runs until ctx ends. Then it cancels its steps, waits up to StopGrace for them, and makes the runs that it
// still has leased due at once, for other drivers. It returns nil after such a stop.
func (d *Driver) Run(ctx context.Context) error {
	// Leases of this owner are from before this process started: no driver drives those runs.
	if n, err := d.leases.ReleaseAll(ctx); err != nil {
		d.log.WarnContext(ctx, "own leases not reclaimed", slog.String("error", err.Error()))
	} else if n > 0 {
		d.log.InfoContext(ctx, "own leases reclaimed", slog.Int64("runs", n))
	}
	// Steps and heartbeats outlive ctx by the grace: their own context ends after it.
	work, stopWork := context.WithCancelCause(context.WithoutCancel(ctx))
	defer stopWork(saga.ErrShutdown)
	d.mu.Lock()
	d.work = work
	d.mu.Unlock()
	d.core.Attach(d)
	defer d.core.Detach(d)
	var loops errgroup.Group
	loops.Go(func() error { d.leases.Run(work); return nil })
	for range committers {
		loops.Go(func() error { d.commits(work); return nil })
	}
	loops.Go(func() error {
		return app.Every(ctx, d.log, "saga_stall", d.cfg.StallSweep, func(ctx context.Context) error {
			if d.core.Resting() {
				return nil // nothing can stall
			}
			_, err := stall.Mark(ctx, d.core, 2*d.cfg.Lease)
			return err
		})
	})
	loops.Go(func() error {
		return app.Every(ctx, d.log, "saga_resume", resumeEvery*d.cfg.Poll, func(ctx context.Context) error {
			if d.core.Resting() {
				return nil // no run is paused
			}
			_, err := d.core.Resume(ctx)
			return err
		})
	})
	d.dispatch(ctx, work)
	d.stop(work)
	stopWork(saga.ErrShutdown)
	err := loops.Wait()
	return err
}

// Abandon makes Run end as a crash would: the driver's runs stay leased, and nothing more is written. For tests of
// recovery.
func (d *Driver) Abandon() { d.gone.Store(true) }

// resumeEvery is how many polls lie between two scans for runs that were paused in rollback mode. An operator ends that
// mode, so that the scan need not be frequent.
const resumeEvery = 5

// dispatch leases runs for free workers until ctx ends.
func (d *Driver) dispatch(ctx, work context.Context) {
	for {
		woken := d.core.Runnable().C()
		free := d.takeSlots(ctx)
		if free == 0 {
			return
		}
		asked := time.Now()
		got, err := d.leases.Take(ctx, free)
		began := time.Now()
		for range free - len(got) {
			d.slots <- struct{}{}
		}
		for _, a := range got {
			d.steps.Go(func() {
				defer func() { d.slots <- struct{}{} }()
				d.drive(work, a)
			})
		}
		if err != nil {
			d.core.Stats().LeaseErrors.Add(1)
			if ctx.Err() != nil {
				return
			}
			d.log.WarnContext(ctx, "lease round failed", slog.String("error", err.Error()))
			if !app.Sleep(ctx, d.cfg.Poll) {
				return
			}
			continue
		}
		poll := d.core.NextPoll(ctx, len(got), d.cfg.Poll)
		if len(got) < free && !d.awaitWork(ctx, woken, asked, poll) {
			return
		}
		if since := time.Since(began); len(got) > 0 && since < leaseGather && !app.Sleep(ctx, leaseGather-since) {
			return
		}
	}
}

// takeSlots waits for a free worker and takes up to a batch of them.
func (d *Driver) takeSlots(ctx context.Context) int {
	if ctx.Err() != nil {
		return 0
	}
	select {
	case <-d.slots:
	case <-ctx.Done():
		return 0
	}
	for n := 1; ; n++ {
		if n == d.cfg.LeaseBatch {
			return n
		}
		select {
		case <-d.slots:
		default:
			return n
		}
	}
}

// awaitWork waits for a wake, the next poll, or the earliest retry in the agenda that was not due yet when runs were
// last leased.
func (d *Driver) awaitWork(ctx context.Context, woken <-chan struct{}, asked time.Time, poll time.Duration) bool {
	wait := poll
	d.mu.Lock()
	if due, ok := d.dues.untilDue(asked, time.Now()); ok {
		wait = min(wait, due)
	}
	d.mu.Unlock()
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-woken:
	case <-timer.C:
	}
	return true
}

// due adds the time at which a run that this driver parked is due again to the agenda. It ignores runs that are due
// after the next poll.
func (d *Driver) due(after time.Duration) {
	if after > d.cfg.Poll {
		return
	}
	d.mu.Lock()
	d.dues.add(time.Now().Add(after + time.Millisecond))
	d.mu.Unlock()
	if after <= 0 {
		d.core.Runnable().Notify()
	}
}

// stop ends the steps with ErrShutdown, waits for them, and makes the runs that are still leased due at once.
func (d *Driver) stop(work context.Context) {
	d.halt.Store(true)
	d.core.Detach(d)
	d.mu.Lock()
	d.closed = true
	d.mu.Unlock()
	if d.gone.Load() {
		for _, a := range d.leases.All() {
			a.Lose(saga.ErrFenced)
		}
		d.steps.Wait()
		return
	}
	for _, a := range d.leases.All() {
		a.End(saga.ErrShutdown)
	}
	done := make(chan struct{})
	go func() { d.steps.Wait(); close(done) }()
	timer := time.NewTimer(d.cfg.StopGrace)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
		for _, a := range d.leases.All() {
			a.Lose(saga.ErrShutdown)
		}
		<-done
	}
	ctx, cancel := context.WithTimeout(work, 5*time.Second)
	defer cancel()
	if _, err := d.leases.ReleaseAll(ctx); err != nil {
		d.log.WarnContext(ctx, "leases not released", slog.String("error", err.Error()))
	}
	d.core.Runnable().Notify()
}
