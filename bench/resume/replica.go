package resume

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

// working is a definition of one step.
const working = "bench_working"

// replica is what a process of lifecycle has of sagas: connections, signals and a driver of its own. It shares nothing with the other one but the database.
type replica struct {
	pool, sequencerPool *pgxpool.Pool
	core                *saga.Core
	loops               map[string]func(context.Context) error
}

// newReplica makes one whose step does what do does.
func newReplica(ctx context.Context, opts Options, do saga.StepFunc) (*replica, error) {
	r := &replica{}
	var err error
	if r.pool, err = pg.Open(ctx, pg.Config{URL: opts.LifecycleURL, ApplicationName: "bench resume", MaxConns: 16, MinConns: 4, Settings: saga.PoolSettings()}); err != nil {
		return nil, err //nolint:wrapcheck // it says what it opened
	}
	if r.sequencerPool, err = pg.Open(ctx, pg.Config{URL: opts.SequencerURL, ApplicationName: "bench sequencer", MaxConns: 2}); err != nil {
		r.close()
		return nil, err //nolint:wrapcheck // it says what it opened
	}
	if err := r.build(opts, do); err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

func (r *replica) build(opts Options, do saga.StepFunc) error {
	registry, err := saga.NewRegistry(saga.Definition{
		Name: working, Version: 1,
		States: saga.WorkspaceStates{
			Running: commonv1.WorkspaceState_WORKSPACE_STATE_RECREATING, Succeeded: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
			Failed: commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
		},
		Steps: []saga.Step{{Name: "work", Class: saga.Pure, Do: do}},
	})
	if err != nil {
		return fmt.Errorf("define steps: %w", err)
	}
	appended, numbered := &events.Signal{}, &events.Signal{}
	sequencer, err := events.NewSequencer(events.SequencerDeps{Pool: r.sequencerPool, Wake: appended, Numbered: numbered, Logger: opts.Logger}, events.SequencerConfig{})
	if err != nil {
		return fmt.Errorf("make sequencer: %w", err)
	}
	if r.core, err = saga.New(saga.Deps{DB: r.pool, Registry: registry, Logger: opts.Logger, Appended: appended}); err != nil {
		return fmt.Errorf("make saga core: %w", err)
	}
	driver, err := saga.NewDriver(r.core, saga.Config{
		Owner: "bench-" + ids.New(), Workers: opts.Runs, LeaseBatch: opts.Runs, Lease: opts.Lease, Heartbeat: opts.Lease / 3,
	})
	if err != nil {
		return fmt.Errorf("make driver: %w", err)
	}
	r.loops = map[string]func(context.Context) error{"sequencer": sequencer.Run, "driver": driver.Run}
	return nil
}

// run runs the loops until ctx ends.
func (r *replica) run(ctx context.Context, logger *slog.Logger) {
	var loops sync.WaitGroup
	for name, loop := range r.loops {
		loops.Go(func() {
			if err := loop(ctx); err != nil && !errors.Is(err, context.Canceled) {
				logger.ErrorContext(ctx, "bench loop failed", slog.String("loop", name), slog.String("error", err.Error()))
			}
		})
	}
	loops.Wait()
}

func (r *replica) close() {
	for _, p := range []*pgxpool.Pool{r.pool, r.sequencerPool} {
		if p != nil {
			p.Close()
		}
	}
}
