// Package background runs a service's ordinary periodic work on River, over the service's own database.
//
// It believes the database about which replica leads, and about when a job last ran. It never carries truth: a job that is lost, late or run twice
// changes only when something is noticed.
//
// Guarantees: a job runs on one replica at a time and about once in its period, while any replica lives; a database that is away at the start is
// waited for; Run returns only when no job of it runs any more, or its grace is over.
package background

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"

	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/obs"
)

// stopGrace is how long Run waits for a job that does not heed its context.
const stopGrace = 5 * time.Second

// Job is one piece of periodic work. Run is short, and idempotent: what one run leaves, the next one finds.
type Job struct {
	Name  string
	Every time.Duration
	Run   func(ctx context.Context) error
}

// Deps of the work.
type Deps struct {
	Pool   *pgxpool.Pool
	Schema string // where the service's River tables are
	Logger *slog.Logger
}

// Runner is the periodic work of one replica.
type Runner struct{ client *river.Client[pgx.Tx] }

// args is every job's row: its name, and nothing else.
type args struct {
	Job string `json:"job" river:"unique"`
}

// Kind names the rows.
func (args) Kind() string { return "periodic" }

type worker struct {
	river.WorkerDefaults[args]

	jobs   map[string]Job
	logger *slog.Logger
}

// Work does one job. A row of a job that this build does not know is another build's: it is dropped.
func (w *worker) Work(ctx context.Context, row *river.Job[args]) error {
	job, ok := w.jobs[row.Args.Job]
	if !ok {
		return river.JobCancel(fmt.Errorf("no job %q", row.Args.Job)) //nolint:wrapcheck // River looks for its own
	}
	if err := app.Protect(ctx, job.Run); err != nil {
		if ctx.Err() == nil {
			w.logger.WarnContext(ctx, "background work failed", slog.String("job", job.Name), obs.Err(err))
		}
		return fmt.Errorf("%s: %w", job.Name, err)
	}
	return nil
}

// New makes the runner of jobs. Nothing runs before Run.
func New(deps Deps, jobs ...Job) (*Runner, error) {
	known := make(map[string]Job, len(jobs))
	periodic := make([]*river.PeriodicJob, 0, len(jobs))
	for _, j := range jobs {
		if j.Name == "" || j.Every <= 0 || j.Run == nil {
			return nil, fmt.Errorf("build background work: job %q has no name, no period or no work", j.Name)
		}
		if _, twice := known[j.Name]; twice {
			return nil, fmt.Errorf("build background work: two jobs %q", j.Name)
		}
		known[j.Name] = j
		periodic = append(periodic, river.NewPeriodicJob(river.PeriodicInterval(j.Every),
			func() (river.JobArgs, *river.InsertOpts) {
				return args{Job: j.Name}, &river.InsertOpts{MaxAttempts: 1, UniqueOpts: river.UniqueOpts{ByArgs: true, ByPeriod: j.Every}}
			}, &river.PeriodicJobOpts{RunOnStart: true}))
	}
	workers := river.NewWorkers()
	river.AddWorker(workers, &worker{jobs: known, logger: deps.Logger})
	client, err := river.NewClient(riverpgxv5.New(deps.Pool), &river.Config{
		Schema: deps.Schema, Logger: slog.New(slog.DiscardHandler), Workers: workers,
		Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 2}},
		// Periodic work may start a second late; listening would cost a connection.
		PollOnly: true, PeriodicJobs: periodic,
	})
	if err != nil {
		return nil, fmt.Errorf("build background work: %w", err)
	}
	return &Runner{client: client}, nil
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
	if err := r.client.StopAndCancel(grace); err != nil {
		return fmt.Errorf("stop background work: %w", err)
	}
	return nil
}
