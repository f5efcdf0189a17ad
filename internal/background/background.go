// Package background runs what a service does once in a while on one of its replicas, whichever it is, on River over the service's own database.
//
// It believes the database about which replica leads, and about when a job last ran. It never carries truth: a job that is lost, late or run twice
// changes only when something is noticed.
//
// Guarantees: a job runs on one replica at a time and about once in its period, while any replica lives; it is ended when its stated time is over, and
// holds up no other job; a database that is away at the start is waited for; Run returns only when no job of it runs any more, or its grace is over.
package background

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"

	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/obs"
)

// stopGrace is how long Run waits for a job that does not heed its context.
const stopGrace = 5 * time.Second

// poll is how often due work is looked for.
const poll = 5 * time.Second

// Job is one piece of periodic work. Run is idempotent: what one run leaves, the next one finds.
type Job struct {
	Name string
	// Every is the period. A run that takes longer than it lets the next ones go by.
	Every time.Duration
	// Timeout is when the context of a run ends.
	Timeout time.Duration
	Run     func(ctx context.Context) error
}

// Deps of the work.
type Deps struct {
	Pool       *pgxpool.Pool
	Schema     string // where the service's River tables are; the name of its role
	Logger     *slog.Logger
	Registerer prometheus.Registerer
}

// Runner is the periodic work of one replica.
type Runner struct {
	client *river.Client[pgx.Tx]
	locks  *locks
}

// args is every job's row: its name, and nothing else.
type args struct {
	Job string `json:"job" river:"unique"`
}

// Kind names the rows.
func (args) Kind() string { return "periodic" }

type worker struct {
	river.WorkerDefaults[args]

	jobs    map[string]Job
	logger  *slog.Logger
	locks   *locks
	metrics *metrics
}

// Timeout implements river.Worker.
func (w *worker) Timeout(row *river.Job[args]) time.Duration { return w.jobs[row.Args.Job].Timeout }

// Work does one job. A row of a job that this build does not know is another build's: it is dropped. So is one whose predecessor still runs.
func (w *worker) Work(ctx context.Context, row *river.Job[args]) error {
	job, ok := w.jobs[row.Args.Job]
	if !ok {
		return river.JobCancel(fmt.Errorf("no job %q", row.Args.Job)) //nolint:wrapcheck // River looks for its own
	}
	free, err := w.locks.take(ctx, job.Name)
	if err != nil {
		return w.failed(ctx, job, err)
	}
	if !free {
		w.metrics.runs.WithLabelValues(job.Name, outcomeBusy).Inc()
		return nil
	}
	defer w.locks.give(ctx, job.Name)
	if row.AttemptedAt != nil {
		w.metrics.lag.WithLabelValues(job.Name).Set(row.AttemptedAt.Sub(row.ScheduledAt).Seconds())
	}
	began := time.Now()
	err = app.Protect(ctx, job.Run)
	w.metrics.seconds.WithLabelValues(job.Name).Observe(time.Since(began).Seconds())
	if err != nil {
		return w.failed(ctx, job, err)
	}
	w.metrics.runs.WithLabelValues(job.Name, outcomeDone).Inc()
	w.metrics.success.WithLabelValues(job.Name).SetToCurrentTime()
	return nil
}

// failed counts and logs a run that failed. One that a stop of the process ended is neither.
func (w *worker) failed(ctx context.Context, job Job, err error) error {
	timedOut := errors.Is(ctx.Err(), context.DeadlineExceeded)
	switch {
	case timedOut:
		w.metrics.runs.WithLabelValues(job.Name, outcomeTimeout).Inc()
		w.logger.WarnContext(ctx, "background work exceeded its time", slog.String("job", job.Name), slog.Duration("timeout", job.Timeout), obs.Err(err))
	case ctx.Err() == nil:
		w.metrics.runs.WithLabelValues(job.Name, outcomeFailed).Inc()
		w.logger.WarnContext(ctx, "background work failed", slog.String("job", job.Name), obs.Err(err))
	}
	return fmt.Errorf("%s: %w", job.Name, err)
}

// New makes the runner of jobs. Nothing runs before Run.
func New(deps Deps, jobs ...Job) (*Runner, error) {
	known := make(map[string]Job, len(jobs))
	longest := time.Duration(0)
	periodic := make([]*river.PeriodicJob, 0, len(jobs))
	for _, j := range jobs {
		if j.Name == "" || j.Every <= 0 || j.Timeout <= 0 || j.Run == nil {
			return nil, fmt.Errorf("build background work: job %q has no name, no period, no timeout or no work", j.Name)
		}
		if _, twice := known[j.Name]; twice {
			return nil, fmt.Errorf("build background work: two jobs %q", j.Name)
		}
		known[j.Name], longest = j, max(longest, j.Timeout)
		periodic = append(periodic, river.NewPeriodicJob(river.PeriodicInterval(j.Every),
			func() (river.JobArgs, *river.InsertOpts) {
				return args{Job: j.Name}, &river.InsertOpts{MaxAttempts: 1, UniqueOpts: river.UniqueOpts{ByArgs: true, ByPeriod: j.Every}}
			}, &river.PeriodicJobOpts{RunOnStart: true}))
	}
	counted, err := newMetrics(deps.Registerer, slices.Sorted(maps.Keys(known)))
	if err != nil {
		return nil, fmt.Errorf("build background work: %w", err)
	}
	held := &locks{pool: deps.Pool, logger: deps.Logger, held: map[string]bool{}}
	workers := river.NewWorkers()
	river.AddWorker(workers, &worker{jobs: known, logger: deps.Logger, locks: held, metrics: counted})
	client, err := river.NewClient(riverpgxv5.New(deps.Pool), &river.Config{
		Schema: deps.Schema, Logger: slog.New(warnings{deps.Logger.Handler()}), Workers: workers,
		// A place for each job, and one for a run that is dropped because its predecessor goes on: no job waits for another.
		Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: len(jobs) + 1}},
		// A row that says running long after its time is of a replica that died.
		RescueStuckJobsAfter: longest + time.Minute,
		// Periodic work may start a few seconds late; listening would cost a connection, and looking for it every second more than the work.
		PollOnly: true, PeriodicJobs: periodic, FetchPollInterval: poll,
	})
	if err != nil {
		return nil, fmt.Errorf("build background work: %w", err)
	}
	return &Runner{client: client, locks: held}, nil
}

// Run works until ctx ends.
func (r *Runner) Run(ctx context.Context) error {
	pause := 100 * time.Millisecond
	for r.client.Start(context.WithoutCancel(ctx)) != nil {
		if !app.Sleep(ctx, pause) {
			return nil
		}
		pause = min(2*pause, 5*time.Second)
	}
	select {
	case <-ctx.Done():
	case <-r.client.Stopped():
		return errors.New("background work stopped by itself")
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopGrace)
	defer cancel()
	defer r.locks.close(context.WithoutCancel(ctx)) // a job that does not heed its context keeps no connection of the pool
	if err := r.client.StopAndCancel(grace); err != nil {
		return fmt.Errorf("stop background work: %w", err)
	}
	return nil
}
