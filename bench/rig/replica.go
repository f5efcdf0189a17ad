package rig

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/drive"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// States are those of the workspaces of a bench's definitions.
var States = saga.WorkspaceStates{
	Running: commonv1.WorkspaceState_WORKSPACE_STATE_RECREATING, Succeeded: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
	Failed: commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
}

// ReplicaConfig describes the parts of a replica.
type ReplicaConfig struct {
	LifecycleURL string // role lifecycle
	SequencerURL string // role sequencer: the event log is numbered while sagas run
	Conns        int32
	Definitions  []saga.Definition
	Workers      int           // of the driver; zero: the replica does not drive, and only answers requests
	Lease        time.Duration // of a run, three heartbeats; zero: production's
	Listens      bool          // it is notified of commits of other replicas
	OnPoint      func(context.Context, string, saga.Place) error
	Logger       *slog.Logger
}

// Replica is the saga engine of a process of lifecycle: connections, signals and a driver of its own. It shares nothing
// with another one but the database.
type Replica struct {
	Pool     *pgxpool.Pool
	Core     *saga.Core
	Appended *events.Signal // notified after commits that appended events

	logger    *slog.Logger
	sequencer *pgxpool.Pool
	loops     map[string]func(context.Context) error
}

// NewReplica makes a replica. Close ends it, after Run has ended.
func NewReplica(ctx context.Context, cfg ReplicaConfig) (*Replica, error) {
	r := &Replica{Appended: &events.Signal{}, logger: cfg.Logger}
	var err error
	r.Pool, err = pg.Open(ctx, pg.Config{
		URL: cfg.LifecycleURL, ApplicationName: LifecycleSessions, MaxConns: cfg.Conns, MinConns: cfg.Conns,
		Settings: saga.PoolSettings(),
	})
	if err == nil {
		r.sequencer, err = pg.Open(ctx, pg.Config{URL: cfg.SequencerURL, ApplicationName: SequencerSessions, MaxConns: 3})
	}
	if err == nil {
		err = r.build(cfg)
	}
	if err != nil {
		r.Close()
		return nil, fmt.Errorf("make replica: %w", err)
	}
	return r, nil
}

func (r *Replica) build(cfg ReplicaConfig) error {
	registry, err := saga.NewRegistry(cfg.Definitions...)
	if err != nil {
		return fmt.Errorf("define steps: %w", err)
	}
	numbered := &events.Signal{}
	sequencer, err := events.NewSequencer(events.SequencerDeps{
		Pool: r.sequencer, Wake: r.Appended, Numbered: numbered,
		Logger: cfg.Logger,
	}, events.SequencerConfig{})
	if err != nil {
		return fmt.Errorf("make sequencer: %w", err)
	}
	r.loops = map[string]func(context.Context) error{"sequencer": sequencer.Run}
	if r.Core, err = saga.New(saga.Deps{
		DB: r.Pool, Registry: registry, Logger: cfg.Logger, Wakes: saga.NewWakes(r.Appended),
		OnPoint: cfg.OnPoint,
	}); err != nil {
		return fmt.Errorf("make saga core: %w", err)
	}
	if cfg.Workers > 0 {
		driver, err := drive.New(r.Core, drive.Config{
			Owner: "bench-" + ids.New(), Workers: cfg.Workers, LeaseBatch: cfg.Workers, Lease: cfg.Lease,
			Heartbeat: cfg.Lease / 3,
		})
		if err != nil {
			return fmt.Errorf("make driver: %w", err)
		}
		r.loops["driver"] = driver.Run
	}
	if cfg.Listens {
		listener, err := events.NewListener(events.ListenerDeps{
			Pool: r.Pool, Numbered: numbered, Wake: r.Appended, Logger: cfg.Logger,
		})
		if err != nil {
			return fmt.Errorf("make listener: %w", err)
		}
		r.loops["listener"] = listener.Run
		r.loops["elsewhere"] = func(ctx context.Context) error { return r.Core.FollowRemoteWakes(ctx, numbered) }
	}
	return nil
}

// Run runs the replica until ctx ends.
func (r *Replica) Run(ctx context.Context) {
	var loops sync.WaitGroup
	for name, loop := range r.loops {
		loops.Go(func() {
			if err := loop(ctx); err != nil && !errors.Is(err, context.Canceled) {
				r.logger.ErrorContext(ctx, "bench loop failed", slog.String("loop", name), slog.String("error", err.Error()))
			}
		})
	}
	loops.Wait()
}

// Start runs the replica in the background and returns the function that ends it.
func (r *Replica) Start(ctx context.Context) func() {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { r.Run(ctx) })
	return func() {
		cancel()
		running.Wait()
	}
}

// Close closes the connections.
func (r *Replica) Close() {
	for _, pool := range []*pgxpool.Pool{r.Pool, r.sequencer} {
		if pool != nil {
			pool.Close()
		}
	}
}

var insertTenant = pg.Define(pg.RoleLifecycle, "rig.insert_tenant",
	`INSERT INTO lifecycle.tenant (id, name) VALUES ($1, $2)`)

// Workspaces makes workspaces of a new tenant, and returns their ids.
func (r *Replica) Workspaces(ctx context.Context, n int) ([]string, error) {
	tenant := ids.New()
	var out []string
	err := pg.InTx(ctx, r.Pool, func(ctx context.Context, tx pgx.Tx) error {
		out = nil
		if _, err := pg.Exec(ctx, tx, insertTenant, tenant, "bench-"+tenant); err != nil {
			return fmt.Errorf("insert tenant: %w", err)
		}
		for i := range n {
			id, err := workspace.Insert(ctx, tx,
				workspace.Draft{TenantID: tenant, Name: fmt.Sprintf("bench-%d", i), CreatedBy: "bench"})
			if err != nil {
				return err
			}
			out = append(out, id)
		}
		return nil
	})
	return out, err
}

// Begin begins a run on a workspace by a commit of its own. The caller tells the driver with Core.Committed.
func (r *Replica) Begin(ctx context.Context, workspace, definition string) (saga.Started, error) {
	var started saga.Started
	err := pg.InTx(ctx, r.Pool, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		started, err = r.Core.Start(ctx, tx, saga.StartRequest{
			WorkspaceID: workspace, Kind: commonv1.OperationKind_OPERATION_KIND_RECREATE, Definition: definition,
			Requester: "bench", NextEpoch: true,
		})
		return err
	})
	if err != nil {
		return started, fmt.Errorf("start run: %w", err)
	}
	return started, nil
}
