// Package join measures how fast a request for a recreation that is already under way is answered: with the lock store,
// and without it.
//
// It owns the load. The server is lifecycle's own, in this process, over a Postgres that writes durably and a Redis of
// the bench's own; no driver runs the operations, so that they stay open. The requirement is on the absolute p95 of an
// answer; the raw round trips that it consists of, a SET NX at Redis and a read by primary key at Postgres, are
// measured in the same run by as many clients.
package join

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"github.com/gpuaas/mesh/bench"
	"github.com/gpuaas/mesh/bench/rig"
	"github.com/gpuaas/mesh/devstack/redisserver"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/lock"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/secretenv"
	"github.com/gpuaas/mesh/services/lifecycle/operation"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/spec"
	"github.com/gpuaas/mesh/services/lifecycle/tenants"
)

// The p95 of an answer, in milliseconds, with Redis and without.
const (
	MostWithRedis    = 5.0
	MostWithoutRedis = 15.0
)

// Options describes where and how long to measure. The URLs name one database.
type Options struct {
	LifecycleURL string // role lifecycle
	OwnerURL     string // a role that may finish operations that no driver runs
	WithoutRedis bool
	Logger       *slog.Logger
	// Length of each measured stretch; zero means 4 s. There are Rounds of them, in turn with the baseline's; zero means
	// 3.
	Length time.Duration
	Rounds int
	// Clients send requests one after the other, each for one of Workspaces in turn; zero means 8 and 64.
	Clients, Workspaces int
}

var defaults = Options{
	Rounds: 3, Clients: 8, Workspaces: 64, Length: 4 * time.Second, Logger: slog.New(slog.DiscardHandler),
}

// server is lifecycle's server with open operations.
type server struct {
	opts   Options
	pool   *pgxpool.Pool
	redis  *redis.Client // nil: without
	server *operation.Server
	open   []asked
}

type asked struct{ workspaceID, runID string }

// Run runs the bench.
func Run(ctx context.Context, opts Options) (bench.Result, error) {
	opts = config.Or(opts, defaults)
	base, err := rig.Open(ctx, opts.OwnerURL, 2)
	if err != nil {
		return bench.Result{}, err
	}
	defer base.Close(ctx)
	r := &server{opts: opts}
	conns := int32(opts.Clients) // small counts
	if r.pool, err = pg.Open(ctx, pg.Config{
		URL: opts.LifecycleURL, ApplicationName: "bench join", MaxConns: conns + 4, MinConns: conns,
		Settings: saga.PoolSettings(),
	}); err != nil {
		return bench.Result{}, err
	}
	defer r.pool.Close()
	var joins *lock.Lock
	base.Details["env_redis"] = "none"
	if !opts.WithoutRedis {
		store, err := redisserver.Start(ctx, redisserver.Config{Logger: opts.Logger})
		if err != nil {
			return bench.Result{}, fmt.Errorf("start the bench's Redis: %w", err)
		}
		defer func() { _ = store.Stop(context.WithoutCancel(ctx)) }()
		base.Details["env_redis"] = map[bool]string{true: "redis-server", false: "the imitation built in"}[store.Real()]
		if r.redis, err = lock.Dial(store.URL(), lock.Config{}); err != nil {
			return bench.Result{}, fmt.Errorf("dial Redis: %w", err)
		}
		defer func() { _ = r.redis.Close() }()
		if joins, err = lock.New(lock.Deps{Client: r.redis, Logger: opts.Logger}, lock.Config{}); err != nil {
			return bench.Result{}, fmt.Errorf("make lock: %w", err)
		}
	}
	if err := r.build(joins); err != nil {
		return bench.Result{}, err
	}
	if err := r.begin(ctx, base.Owner); err != nil {
		return bench.Result{}, err
	}
	return r.measure(ctx, base)
}

func (r *server) build(joins *lock.Lock) error {
	catalogue := spec.Catalogue{
		Plans:   map[string]spec.Plan{"local": {MaxGPUs: 8, MaxStorageBytes: 1 << 40, MaxWorkloads: 4}},
		Regions: []string{"here"},
		Default: commonv1.PlacementDriver_PLACEMENT_DRIVER_PROCESS,
	}
	registry, err := provision.NewSteps(provision.StepDeps{Catalogue: catalogue}).Registry()
	if err != nil {
		return fmt.Errorf("define sagas: %w", err)
	}
	core, err := saga.New(saga.Deps{DB: r.pool, Registry: registry, Logger: r.opts.Logger})
	if err != nil {
		return fmt.Errorf("make saga core: %w", err)
	}
	keys, err := secretenv.Parse(secretenv.NewKey())
	if err != nil {
		return fmt.Errorf("make keys: %w", err)
	}
	log, err := audit.New(audit.Deps{
		Logger: r.opts.Logger, Pool: r.pool, Schema: pg.RoleLifecycle, Policy: policy.Fixed{Set: policy.Defaults()},
		Wake: &events.Signal{},
	})
	if err != nil {
		return fmt.Errorf("make audit log: %w", err)
	}
	r.server = operation.NewServer(operation.Deps{
		Logger: r.opts.Logger, DB: r.pool, Core: core, Catalogue: catalogue, Lock: joins,
		Policy: policy.Fixed{Set: policy.Defaults()}, Audit: log,
		DefaultQuota: tenants.Quota{Workspaces: 1 << 20, GPUs: 1 << 20, StorageBytes: 1 << 60}, Secrets: keys,
	})
	return nil
}

var (
	finishRuns = pg.Define(pg.RoleOwner, "join.finish_runs", `
	UPDATE lifecycle.saga_run SET state = 'succeeded', finished_at = mesh.clock(), why_waiting = ''
		WHERE finished_at IS NULL`)
	activateWorkspaces = pg.Define(pg.RoleOwner, "join.activate_workspaces",
		`UPDATE lifecycle.workspace SET state = 'active'`)
)

// begin makes workspaces with a recreation under way on each.
func (r *server) begin(ctx context.Context, owner *pgxpool.Pool) error {
	tenant := "b" + ids.New()[24:]
	if _, err := r.server.CreateTenant(ctx, &lifecyclev1.CreateTenantRequest{Name: tenant}); err != nil {
		return fmt.Errorf("make tenant: %w", err)
	}
	for n := range r.opts.Workspaces {
		res, err := r.server.RequestOperation(ctx, &lifecyclev1.RequestOperationRequest{
			Kind: commonv1.OperationKind_OPERATION_KIND_CREATE,
			Target: &lifecyclev1.RequestOperationRequest_Create{
				Create: &lifecyclev1.CreateWorkspace{Tenant: tenant, Name: fmt.Sprintf("w%d", n)},
			},
		})
		if err != nil {
			return fmt.Errorf("make workspace: %w", err)
		}
		r.open = append(r.open, asked{workspaceID: res.GetOperation().GetWorkspaceId()})
	}
	for _, s := range []*pg.Statement{finishRuns, activateWorkspaces} {
		if _, err := pg.Exec(ctx, owner, s); err != nil {
			return fmt.Errorf("finish runs that no driver has: %w", err)
		}
	}
	for i := range r.open {
		op, err := r.ask(ctx, r.open[i].workspaceID)
		if err != nil {
			return err
		}
		if op.GetJoined() {
			return errors.New("begin recreation: another caller's is open")
		}
		r.open[i].runID = op.GetOperationId()
	}
	return nil
}

func (r *server) ask(ctx context.Context, workspaceID string) (*lifecyclev1.Operation, error) {
	res, err := r.server.RequestOperation(ctx, &lifecyclev1.RequestOperationRequest{
		Kind: commonv1.OperationKind_OPERATION_KIND_RECREATE, Requester: "watchdog", Reason: "a bench asks",
		Target: &lifecyclev1.RequestOperationRequest_WorkspaceId{WorkspaceId: workspaceID},
	})
	if err != nil {
		return nil, fmt.Errorf("ask for a recreation: %w", err)
	}
	return res.GetOperation(), nil
}

// join sends one request, and checks that the answer is the open operation.
func (r *server) join(ctx context.Context, o asked) error {
	op, err := r.ask(ctx, o.workspaceID)
	if err != nil {
		return err
	}
	if !op.GetJoined() || op.GetOperationId() != o.runID {
		return fmt.Errorf("join: answered %s (joined %v), %s is open", op.GetOperationId(), op.GetJoined(), o.runID)
	}
	return nil
}

func (r *server) measure(ctx context.Context, base *rig.Rig) (bench.Result, error) {
	if _, err := r.load(ctx, time.Second/2, r.join); err != nil { // statements prepared, pools filled
		return bench.Result{}, err
	}
	var answers, setNX, reads []time.Duration
	for range r.opts.Rounds {
		for _, one := range []struct {
			into *[]time.Duration
			do   func(context.Context, asked) error
			when bool
		}{{&setNX, r.rawSetNX, r.redis != nil}, {&reads, r.rawRead, true}, {&answers, r.join, true}} {
			if !one.when {
				continue
			}
			length := r.opts.Length
			if one.into != &answers {
				length /= 2
			}
			took, err := r.load(ctx, length, one.do)
			if err != nil {
				return bench.Result{}, err
			}
			*one.into = append(*one.into, took...)
		}
	}
	name, most := "join with Redis", MostWithRedis
	if r.redis == nil {
		name, most = "join without Redis", MostWithoutRedis
	}
	baseline := bench.Percentile(reads, .95)
	maps.Copy(base.Details, map[string]any{
		"baseline":                 "p95 of one read by primary key",
		"raw_postgres_read_ms_p50": bench.Percentile(reads, .5), "raw_postgres_read_ms_p95": baseline,
		"answer_ms_p50": bench.Percentile(answers, .5), "answer_ms_p99": bench.Percentile(answers, .99),
		"answers": len(answers), "clients": r.opts.Clients, "workspaces": r.opts.Workspaces,
	})
	if r.redis != nil {
		raw := bench.Percentile(setNX, .95)
		maps.Copy(base.Details, map[string]any{
			"baseline":                "p95 of one SET NX at Redis and p95 of one read by primary key, added",
			"raw_redis_set_nx_ms_p50": bench.Percentile(setNX, .5), "raw_redis_set_nx_ms_p95": raw,
		})
		baseline += raw
	}
	return base.AtMost(name, "ms p95", bench.Percentile(answers, .95), baseline, most), nil
}

// load has every client repeat do, in turn on each operation, and returns how long each call took.
func (r *server) load(ctx context.Context, length time.Duration,
	do func(context.Context, asked) error,
) ([]time.Duration, error) {
	var clients errgroup.Group
	var calls atomic.Int64
	took := make([][]time.Duration, r.opts.Clients)
	stop := time.Now().Add(length)
	for n := range r.opts.Clients {
		clients.Go(func() error {
			for time.Now().Before(stop) {
				o := r.open[int(calls.Add(1))%len(r.open)]
				begin := time.Now()
				if err := do(ctx, o); err != nil {
					return err
				}
				took[n] = append(took[n], time.Since(begin))
			}
			return nil
		})
	}
	err := clients.Wait()
	return slices.Concat(took...), err
}
