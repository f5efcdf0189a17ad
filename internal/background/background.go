package background

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/obs"
)

const (
	// stopGrace is how long Run waits for a job that does not heed its context.
	stopGrace = 5 * time.Second
	// shortestSleep is the least time between two queries for what is due: of two replicas that wake at the same moment
	// the later finds the job taken.
	shortestSleep = 50 * time.Millisecond
	// longestSleep bounds the time between two queries for what is due: another session may have changed a row meanwhile.
	longestSleep = time.Minute
	// retryMost bounds the pause after a query that failed.
	retryMost = 5 * time.Second
	// apart is how long a job waits at most for the end of another that was due with it: short ones run one after the
	// other, over one connection.
	apart = 50 * time.Millisecond
)

// Job is one piece of periodic work. Run is idempotent: the next run does what one run has left undone.
type Job struct {
	Name string
	// Every is the period. While a run takes longer than the period, the runs that become due are dropped.
	Every time.Duration
	// Timeout is when the context of a run ends.
	Timeout time.Duration
	Run     func(ctx context.Context) error
}

// Deps of the work. Pool logs in as the service.
type Deps struct {
	Pool       *pgxpool.Pool
	Logger     *slog.Logger
	Registerer prometheus.Registerer
}

// Runner is the periodic work of one replica.
type Runner struct {
	jobs     map[string]Job
	schedule schedule
	logger   *slog.Logger
	locks    *locks
	metrics  *metrics
	apart    time.Duration // see apart
}

// New returns a runner of jobs. No job runs before Run is called.
func New(deps Deps, jobs ...Job) (*Runner, error) {
	known := make(map[string]Job, len(jobs))
	for _, j := range jobs {
		if j.Name == "" || j.Every <= 0 || j.Timeout <= 0 || j.Run == nil {
			return nil, fmt.Errorf("build background work: job %q has no name, no period, no timeout or no work", j.Name)
		}
		if _, twice := known[j.Name]; twice {
			return nil, fmt.Errorf("build background work: two jobs %q", j.Name)
		}
		known[j.Name] = j
	}
	names := slices.Sorted(maps.Keys(known))
	counted, err := newMetrics(deps.Registerer, names)
	if err != nil {
		return nil, fmt.Errorf("build background work: %w", err)
	}
	plan := schedule{names: names}
	for _, name := range names {
		plan.every = append(plan.every, known[name].Every.Seconds())
	}
	held := &locks{pool: deps.Pool, logger: deps.Logger, within: unlockWithin, held: map[string]bool{}}
	return &Runner{jobs: known, schedule: plan, logger: deps.Logger, locks: held, metrics: counted, apart: apart}, nil
}

// Run runs jobs as they become due until ctx ends.
func (r *Runner) Run(ctx context.Context) error {
	work, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	var running sync.WaitGroup
	r.dispatch(ctx, func(due []dueRow) {
		running.Go(func() { r.begin(work, due, &running) })
	})
	stop()
	defer r.locks.close(context.WithoutCancel(ctx)) // a job that does not heed its context keeps no connection of the pool
	ended := make(chan struct{})
	go func() { running.Wait(); close(ended) }()
	grace := time.NewTimer(stopGrace)
	defer grace.Stop()
	select {
	case <-ended:
		return nil
	case <-grace.C:
		return errors.New("stop background work: a job goes on after its context has ended")
	}
}

// begin runs jobs that are due together: each starts when the one before it has ended, or after apart if that is
// sooner.
func (r *Runner) begin(ctx context.Context, due []dueRow, running *sync.WaitGroup) {
	for _, job := range due {
		ended := make(chan struct{})
		running.Go(func() {
			defer close(ended)
			r.work(ctx, r.jobs[job.Name], seconds(job.Late), job.Free)
		})
		timer := time.NewTimer(r.apart)
		select {
		case <-ended:
		case <-timer.C:
		case <-ctx.Done(): // the remaining jobs end at once, and release their locks
		}
		timer.Stop()
	}
}

// dispatch begins the jobs that are due until ctx ends.
func (r *Runner) dispatch(ctx context.Context, begin func(due []dueRow)) {
	failures := 0
	for {
		call, cancel := context.WithTimeout(ctx, retryMost)
		due, left, err := r.locks.take(call, r.schedule)
		cancel()
		switch {
		case ctx.Err() != nil && err != nil:
			return
		case err != nil:
			if failures++; failures%10 == 1 {
				r.logger.WarnContext(ctx, "periodic work not looked for", slog.Int("failures", failures), obs.Err(err))
			}
			left = min(100*time.Millisecond<<min(failures, 6), retryMost)
		default:
			failures = 0
		}
		if len(due) > 0 {
			begin(due)
		}
		if !app.Sleep(ctx, max(left, shortestSleep)) {
			return
		}
	}
}

// work runs one job, which is locked. If free is false, a run of the job is under way here or on another replica, and
// work only counts that.
func (r *Runner) work(ctx context.Context, job Job, late time.Duration, free bool) {
	ctx, cancel := context.WithTimeout(ctx, job.Timeout)
	defer cancel()
	if !free {
		r.metrics.runs.WithLabelValues(job.Name, outcomeBusy).Inc()
		return
	}
	defer r.locks.give(ctx, job.Name)
	r.metrics.lag.WithLabelValues(job.Name).Set(late.Seconds())
	began := time.Now()
	err := app.Protect(ctx, job.Run)
	r.metrics.seconds.WithLabelValues(job.Name).Observe(time.Since(began).Seconds())
	if err != nil {
		r.failed(ctx, job, err)
		return
	}
	r.metrics.runs.WithLabelValues(job.Name, outcomeDone).Inc()
	r.metrics.success.WithLabelValues(job.Name).SetToCurrentTime()
}

// failed counts and logs a run that failed. A run that ended because the process stops is neither counted nor logged.
func (r *Runner) failed(ctx context.Context, job Job, err error) {
	timedOut := errors.Is(ctx.Err(), context.DeadlineExceeded)
	switch {
	case timedOut:
		r.metrics.runs.WithLabelValues(job.Name, outcomeTimeout).Inc()
		r.logger.WarnContext(ctx, "background work exceeded its time", slog.String("job", job.Name),
			slog.Duration("timeout", job.Timeout), obs.Err(err))
	case ctx.Err() == nil:
		r.metrics.runs.WithLabelValues(job.Name, outcomeFailed).Inc()
		r.logger.WarnContext(ctx, "background work failed", slog.String("job", job.Name), obs.Err(err))
	}
}
