package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	"github.com/gpuaas/mesh/bench/beside/peer"
	"github.com/gpuaas/mesh/bench/pending"
)

// patience is how long the last job of a stretch may take.
const patience = time.Minute

type noopArgs struct {
	Nonce string `json:"nonce"`
}

// Kind returns the job's kind.
func (noopArgs) Kind() string { return "noop" }

type noopWorker struct {
	river.WorkerDefaults[noopArgs]
}

// Work does nothing.
func (noopWorker) Work(context.Context, *river.Job[noopArgs]) error { return nil }

type riverEngine struct {
	pool   *pgxpool.Pool
	client *river.Client[pgx.Tx]
	ends   *pending.Units[int64] // jobs
}

func (e *riverEngine) start(ctx context.Context, databaseURL string, setup peer.Setup) (peer.Described, error) {
	cfg, err := pgxpool.ParseConfig(databaseURL)
	if err != nil {
		return peer.Described{}, fmt.Errorf("read database url: %w", err)
	}
	const conns = 40 // 16 clients, the fetches and the completions
	cfg.MaxConns = conns
	if e.pool, err = pgxpool.NewWithConfig(ctx, cfg); err != nil {
		return peer.Described{}, fmt.Errorf("open database: %w", err)
	}
	driver := riverpgxv5.New(e.pool)
	migrator, err := rivermigrate.New(driver, nil)
	if err == nil {
		_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
	}
	if err != nil {
		return peer.Described{}, fmt.Errorf("migrate: %w", err)
	}
	workers := river.NewWorkers()
	river.AddWorker(workers, noopWorker{})
	rc := &river.Config{
		Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: setup.Workers}}, Workers: workers,
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	}
	said := map[string]any{
		"workers": setup.Workers, "connections": conns, "fetch_cooldown": "default (100ms)",
		"fetch_poll_interval": "default (1s)",
	}
	if setup.Cooldown > 0 {
		rc.FetchCooldown = setup.Cooldown
		said["fetch_cooldown"] = setup.Cooldown.String()
	}
	if e.client, err = river.NewClient(driver, rc); err != nil {
		return peer.Described{}, fmt.Errorf("make client: %w", err)
	}
	e.ends = pending.New[int64]()
	// An event comes once the job's end is committed. Those that overflow the channel would be dropped.
	done, _ := e.client.SubscribeConfig(&river.SubscribeConfig{
		ChanSize: 1 << 20,
		Kinds:    []river.EventKind{river.EventKindJobCompleted, river.EventKindJobFailed},
	})
	go e.follow(done)
	if err := e.client.Start(ctx); err != nil {
		return peer.Described{}, fmt.Errorf("start: %w", err)
	}
	return peer.Described{Version: version("github.com/riverqueue/river"), Settings: said}, nil
}

func (e *riverEngine) follow(done <-chan *river.Event) {
	for event := range done {
		e.ends.Ended(event.Job.ID, time.Now())
	}
}

// stretch inserts one job in a statement and a commit of its own, by each client, while no more than the outstanding
// ones wait.
func (e *riverEngine) stretch(ctx context.Context, load peer.Load) (peer.Stretch, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, load.Length+patience, errors.New("the last job was not done in time"))
	defer cancel()
	var seen timings
	var clients, jobs sync.WaitGroup
	errs := make(chan error, load.Clients)
	room := make(chan struct{}, max(load.Outstanding, load.Clients))
	began := time.Now()
	until := began.Add(load.Length)
	for range load.Clients {
		clients.Go(func() {
			for {
				select {
				case room <- struct{}{}:
				case <-ctx.Done():
					return
				}
				at := time.Now()
				if !at.Before(until) {
					return
				}
				inserted, err := e.client.Insert(ctx, noopArgs{Nonce: "bench"}, nil)
				if err != nil {
					errs <- fmt.Errorf("insert job: %w", err)
					return
				}
				done := e.ends.Expect(inserted.Job.ID)
				jobs.Go(func() {
					select {
					case end := <-done:
						seen.add(at, end)
						<-room
					case <-ctx.Done():
					}
				})
			}
		})
	}
	clients.Wait()
	jobs.Wait()
	select {
	case err := <-errs:
		return peer.Stretch{}, err
	default:
	}
	if ctx.Err() != nil {
		return peer.Stretch{}, context.Cause(ctx)
	}
	return seen.stretch(began), nil
}

func (e *riverEngine) stop() {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if e.client != nil {
		_ = e.client.StopAndCancel(ctx)
	}
	if e.pool != nil {
		e.pool.Close()
	}
}
