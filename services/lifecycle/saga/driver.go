package saga

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/pg"
)

// Driver leases runs and executes their steps. Any number of drivers may work on one database.
type Driver struct {
	core        *Core
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
	closed bool                 // the driver takes no further run
	active map[string]*activity // by run
	poison map[string]time.Time // runs not to be leased before that time
	dues   agenda               // retries that this driver knows of
}

// activity is one run that this driver has leased.
type activity struct {
	id string     // of the run
	h  *leasedRun // belongs to the goroutine that drives it

	beating atomic.Bool // a heartbeat for this run alone waits for its row

	mu       sync.Mutex
	cancel   context.CancelCauseFunc // of the step's context
	deadline time.Time               // local end of the lease, monotonic
	fence    int64
	dead     bool // the lease is lost; this driver writes nothing more for the run
	cancelAt bool // a cancel has been seen
	undoing  bool // the run compensates: a cancel changes nothing
}

// committers is how many transactions of a driver's transitions are under way at once: while one waits for its flush,
// the next gathers and writes.
const committers = 2

// leaseGather is how long a driver that has just leased something waits before it leases again, so that runs that
// become due together are leased together. A run that becomes due alone does not wait.
const leaseGather = 2 * time.Millisecond

// NewDriver makes a driver of core.
func NewDriver(core *Core, cfg Config) (*Driver, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("configure saga driver: %w", err)
	}
	cfg = cfg.withDefaults()
	d := &Driver{
		core: core, cfg: cfg, log: core.log.With(slog.String("owner", cfg.Owner)), slots: make(chan struct{}, cfg.Workers),
		transitions: make(chan *transition, cfg.Workers), active: map[string]*activity{}, poison: map[string]time.Time{},
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
	if n, err := d.core.releaseAll(ctx, d.cfg.Owner); err != nil {
		d.log.WarnContext(ctx, "own leases not reclaimed", slog.String("error", err.Error()))
	} else if n > 0 {
		d.log.InfoContext(ctx, "own leases reclaimed", slog.Int64("runs", n))
	}
	// Steps and heartbeats outlive ctx by the grace: their own context ends after it.
	work, stopWork := context.WithCancelCause(context.WithoutCancel(ctx))
	defer stopWork(ErrShutdown)
	d.mu.Lock()
	d.work = work
	d.mu.Unlock()
	d.core.attach(d)
	defer d.core.detach(d)
	var loops errgroup.Group
	loops.Go(func() error { d.heartbeats(work); return nil })
	loops.Go(func() error { d.cancels(work); return nil })
	loops.Go(func() error { d.watch(work); return nil })
	for range committers {
		loops.Go(func() error { d.commits(work); return nil })
	}
	loops.Go(func() error {
		return app.Every(ctx, d.log, "saga_stall", d.cfg.StallSweep, func(ctx context.Context) error {
			if d.core.resting.Load() {
				return nil // nothing can stall
			}
			_, err := d.core.MarkStalls(ctx, 2*d.cfg.Lease)
			return err
		})
	})
	loops.Go(func() error {
		return app.Every(ctx, d.log, "saga_resume", resumeEvery*d.cfg.Poll, func(ctx context.Context) error {
			if d.core.resting.Load() {
				return nil // no run is paused
			}
			_, err := d.core.Resume(ctx)
			return err
		})
	})
	d.dispatch(ctx, work)
	d.stop(work)
	stopWork(ErrShutdown)
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
		woken := d.core.runnable.C()
		free := d.takeSlots(ctx)
		if free == 0 {
			return
		}
		asked := time.Now()
		got, err := d.leaseOnce(ctx, free)
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
			d.core.stats.LeaseErrors.Add(1)
			if ctx.Err() != nil {
				return
			}
			d.log.WarnContext(ctx, "lease round failed", slog.String("error", err.Error()))
			if !app.Sleep(ctx, d.cfg.Poll) {
				return
			}
			continue
		}
		atRest := false
		if len(got) == 0 {
			atRest = d.core.atRest(ctx)
		} else {
			d.core.resting.Store(false)
		}
		if len(got) < free && !d.rest(ctx, woken, asked, atRest) {
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

// rest waits for a wake, the next poll, or the earliest retry in the agenda that was not due yet when runs were last
// leased. Without a live run nothing becomes due as time passes: each start comes with a wake, and the poll finds the
// runs whose wake was lost.
func (d *Driver) rest(ctx context.Context, woken <-chan struct{}, asked time.Time, atRest bool) bool {
	wait := d.cfg.Poll
	if atRest {
		wait = d.core.notified.Load().Period(wait)
	}
	d.mu.Lock()
	if next, ok := d.dues.next(asked, time.Now()); ok {
		wait = min(wait, next)
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
		d.core.runnable.Notify()
	}
}

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
			cancelAt: h.run.CancelAt != nil, undoing: h.run.Phase == phaseUndo,
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

// stop ends the steps with ErrShutdown, waits for them, and makes the runs that are still leased due at once.
func (d *Driver) stop(work context.Context) {
	d.halt.Store(true)
	d.core.detach(d)
	d.mu.Lock()
	d.closed = true
	d.mu.Unlock()
	if d.gone.Load() {
		for _, a := range d.snapshot() {
			a.lose(ErrFenced)
		}
		d.steps.Wait()
		return
	}
	for _, a := range d.snapshot() {
		a.end(ErrShutdown)
	}
	done := make(chan struct{})
	go func() { d.steps.Wait(); close(done) }()
	timer := time.NewTimer(d.cfg.StopGrace)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
		for _, a := range d.snapshot() {
			a.lose(ErrShutdown)
		}
		<-done
	}
	ctx, cancel := context.WithTimeout(work, 5*time.Second)
	defer cancel()
	if _, err := d.core.releaseAll(ctx, d.cfg.Owner); err != nil {
		d.log.WarnContext(ctx, "leases not released", slog.String("error", err.Error()))
	}
	d.core.runnable.Notify()
}

// end cancels the step that runs, if any; the driver goes on with the run.
func (a *activity) end(cause error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.cancel != nil {
		a.cancel(cause)
	}
}

// lose marks the lease as lost: the step's context ends, and this driver writes nothing more for the run.
func (a *activity) lose(cause error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.dead = true
	if a.cancel != nil {
		a.cancel(cause)
	}
}

func (a *activity) lost() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.dead
}
