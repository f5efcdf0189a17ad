package cancel

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// The two definitions: a step that works until its context ends, and one that is parked, as for a task of an agent, until it is undone.
const (
	working = "bench_working"
	parked  = "bench_parked"
)

// replica is what a process of lifecycle has of sagas: connections, signals, a driver and the verbs of its own. It shares nothing with the other one but the
// database.
type replica struct {
	pool, sequencerPool *pgxpool.Pool
	core                *saga.Core
	server              *workspace.Server
	loops               map[string]func(context.Context) error
}

// newReplica makes one; a replica that does not drive only answers requests.
func newReplica(ctx context.Context, opts Options, registry *saga.Registry, drives bool) (*replica, error) {
	r := &replica{}
	var err error
	if r.pool, err = pg.Open(ctx, pg.Config{URL: opts.LifecycleURL, ApplicationName: "bench cancel", MaxConns: 16, MinConns: 8, Settings: saga.PoolSettings()}); err != nil {
		return nil, err
	}
	if r.sequencerPool, err = pg.Open(ctx, pg.Config{URL: opts.SequencerURL, ApplicationName: "bench sequencer", MaxConns: 2}); err != nil {
		r.close()
		return nil, err
	}
	if err := r.build(opts, registry, drives); err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

func (r *replica) build(opts Options, registry *saga.Registry, drives bool) error {
	appended, numbered := &events.Signal{}, &events.Signal{}
	sequencer, err := events.NewSequencer(events.SequencerDeps{Pool: r.sequencerPool, Wake: appended, Numbered: numbered, Logger: opts.Logger}, events.SequencerConfig{})
	if err != nil {
		return fmt.Errorf("make sequencer: %w", err)
	}
	if r.core, err = saga.New(saga.Deps{DB: r.pool, Registry: registry, Logger: opts.Logger, Appended: appended}); err != nil {
		return fmt.Errorf("make saga core: %w", err)
	}
	driver, err := saga.NewDriver(r.core, saga.Config{
		Owner: "bench-" + ids.New(), Workers: opts.Cancels, LeaseBatch: opts.Cancels, Lease: opts.Lease, Heartbeat: opts.Lease / 3,
	})
	if err != nil {
		return fmt.Errorf("make driver: %w", err)
	}
	log, err := audit.New(audit.Deps{Logger: opts.Logger, Pool: r.pool, Schema: pg.RoleLifecycle, Policy: policy.Fixed{Set: policy.Defaults()}, Wake: appended})
	if err != nil {
		return fmt.Errorf("make audit log: %w", err)
	}
	r.server = workspace.NewServer(workspace.Deps{
		Logger: opts.Logger, DB: r.pool, Core: r.core, Policy: policy.Fixed{Set: policy.Defaults()}, Audit: log,
	})
	r.loops = map[string]func(context.Context) error{"sequencer": sequencer.Run}
	if drives {
		r.loops["driver"] = driver.Run
	}
	if opts.HeartbeatAlone {
		return nil
	}
	listener, err := events.NewListener(r.pool, numbered, opts.Logger)
	if err != nil {
		return fmt.Errorf("make listener: %w", err)
	}
	r.loops["listener"] = listener.Run
	r.loops["elsewhere"] = func(ctx context.Context) error { return r.core.FollowElsewhere(ctx, numbered) }
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

// registry is of a replica: its steps say who drives them, and when they heard of the cancel.
func (g *rig) registry(replica int) (*saga.Registry, error) {
	states := saga.WorkspaceStates{
		Running: commonv1.WorkspaceState_WORKSPACE_STATE_RECREATING, Succeeded: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
		Failed: commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
	}
	return saga.NewRegistry(
		saga.Definition{Name: working, Version: 1, States: states, Steps: []saga.Step{{
			Name: "work", Class: saga.Pure,
			Do: func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
				x := g.runs[env.WorkspaceID]
				x.began(replica)
				<-ctx.Done()
				now := time.Now()
				if errors.Is(context.Cause(ctx), saga.ErrCancelRequested) {
					x.heard(now)
				}
				return saga.Outcome{}, context.Cause(ctx)
			},
			Undo: g.undo, // by then the context has gone, also that of a step whose driver had lost its lease
		}}},
		saga.Definition{Name: parked, Version: 1, States: states, Steps: []saga.Step{{
			Name: "wait", Class: saga.Pure,
			Do: func(_ context.Context, env *saga.Env) (saga.Outcome, error) {
				g.runs[env.WorkspaceID].began(replica)
				return saga.Wait(saga.WaitFor{For: time.Hour, Why: "waiting for an agent", WakeOnSignal: true}), nil
			},
			Undo: g.undo,
		}}},
	)
}

func (g *rig) undo(_ context.Context, env *saga.Env) (saga.Outcome, error) {
	g.runs[env.WorkspaceID].heard(time.Now())
	return saga.Done(nil), nil
}
