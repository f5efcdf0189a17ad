package recovery

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

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/enrol"
)

// sweepArgs is the periodic job that ends what time has ended.
type sweepArgs struct{}

// Kind names the job.
func (sweepArgs) Kind() string { return "recovery_sweep" }

// sweeper runs it.
type sweeper struct {
	river.WorkerDefaults[sweepArgs]

	enroller *enrol.Enroller
	logger   *slog.Logger
}

// Work sweeps once. What one run leaves, the next one finds.
func (s *sweeper) Work(ctx context.Context, _ *river.Job[sweepArgs]) error {
	swept, err := s.enroller.Sweep(ctx)
	if err != nil {
		return fmt.Errorf("sweep enrolments: %w", err)
	}
	if swept.Tokens+swept.Claims+swept.Sessions > 0 {
		s.logger.DebugContext(ctx, "enrolments swept", slog.Int64("tokens", swept.Tokens), slog.Int64("claims", swept.Claims),
			slog.Int64("sessions", swept.Sessions))
	}
	return nil
}

// background is the service's periodic work. One replica leads; the others wait to.
type background struct{ client *river.Client[pgx.Tx] }

func newBackground(pool *pgxpool.Pool, logger *slog.Logger, enroller *enrol.Enroller, every time.Duration) (*background, error) {
	workers := river.NewWorkers()
	river.AddWorker(workers, &sweeper{enroller: enroller, logger: logger})
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
		Schema: pg.RoleRecovery, Logger: slog.New(slog.DiscardHandler), Workers: workers,
		Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 2}},
		// A sweep may start a second late; listening would cost a connection.
		PollOnly: true,
		PeriodicJobs: []*river.PeriodicJob{river.NewPeriodicJob(river.PeriodicInterval(every),
			func() (river.JobArgs, *river.InsertOpts) {
				return sweepArgs{}, &river.InsertOpts{MaxAttempts: 1, UniqueOpts: river.UniqueOpts{ByPeriod: every}}
			}, &river.PeriodicJobOpts{RunOnStart: true})},
	})
	if err != nil {
		return nil, fmt.Errorf("build background work: %w", err)
	}
	return &background{client: client}, nil
}

// Run works until ctx ends. A database that is away at the start is waited for.
func (b *background) Run(ctx context.Context) error {
	pause := 100 * time.Millisecond
	for {
		err := b.client.Start(context.WithoutCancel(ctx))
		if err == nil {
			break
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-timer.C:
		}
		pause = min(2*pause, 5*time.Second)
	}
	select {
	case <-ctx.Done():
	case <-b.client.Stopped():
		return errors.New("background work stopped by itself")
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if err := b.client.StopAndCancel(grace); err != nil {
		return fmt.Errorf("stop background work: %w", err)
	}
	return nil
}
