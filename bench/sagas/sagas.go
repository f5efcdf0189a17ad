// Package sagas measures runs of six no-op steps per second against the single-row commits per second of the same Postgres.
package sagas

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/bench"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

// Required is the least ratio of runs to commits; Aim is what the design is after.
const (
	Required = 0.02
	Aim      = 0.035
)

const (
	stepCount  = 6
	definition = "bench"
	// perClient is how many workspaces a client has: no mesh runs hundreds of operations a second on one.
	perClient = 32
)

// Options says where and how long to measure. The three URLs name one database.
type Options struct {
	LifecycleURL string // role lifecycle
	SequencerURL string // role sequencer: the event log is numbered while sagas run
	OwnerURL     string // a role that may create a schema, for the baseline's table
	Logger       *slog.Logger
	// Length of each measured stretch; zero means 4 s. There are Rounds stretches of each kind in turn; zero means 3.
	Length time.Duration
	Rounds int
	// Clients start runs, each on a workspace of its own, and wait for them; zero means 48. Workers drive them; zero means 32.
	Clients, Workers int
}

func (o Options) withDefaults() Options {
	if o.Length == 0 {
		o.Length = 4 * time.Second
	}
	if o.Rounds == 0 {
		o.Rounds = 3
	}
	if o.Clients == 0 {
		o.Clients = 48
	}
	if o.Workers == 0 {
		o.Workers = 32
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o
}

// rig is a saga core with its driver and sequencer on the database under measurement.
type rig struct {
	pool  *pgxpool.Pool
	core  *saga.Core
	mu    sync.Mutex
	runs  map[string]*watched
	early map[string]time.Time // claims of runs that their client has not registered yet
	ended map[string]time.Time
}

// watched is one run from its start to its end.
type watched struct {
	claimed time.Time
	done    chan time.Time
}

// Run measures. Nothing of it stays in the database but archived rows of a tenant named bench.
func Run(ctx context.Context, opts Options) (bench.Result, error) {
	opts = opts.withDefaults()
	owner, err := pg.Open(ctx, pg.Config{URL: opts.OwnerURL, ApplicationName: "bench baseline", MaxConns: baselineClients, MinConns: baselineClients})
	if err != nil {
		return bench.Result{}, err
	}
	defer owner.Close()
	details, err := bench.Environment(ctx, owner)
	if err != nil {
		return bench.Result{}, err
	}
	if err := prepareBaseline(ctx, owner); err != nil {
		return bench.Result{}, err
	}
	defer func() { _ = dropBaseline(context.WithoutCancel(ctx), owner) }()
	r, stop, err := start(ctx, opts)
	if err != nil {
		return bench.Result{}, err
	}
	defer stop()
	workspaces, err := r.workspaces(ctx, opts.Clients*perClient)
	if err != nil {
		return bench.Result{}, err
	}
	if _, _, err := r.load(ctx, workspaces, time.Second); err != nil { // statements prepared, pools filled
		return bench.Result{}, err
	}
	var base, rate []float64
	var loaded timings
	for range opts.Rounds {
		b, err := commits(ctx, owner, opts.Length/2)
		if err != nil {
			return bench.Result{}, err
		}
		s, t, err := r.load(ctx, workspaces, opts.Length)
		if err != nil {
			return bench.Result{}, err
		}
		b2, err := commits(ctx, owner, opts.Length/2)
		if err != nil {
			return bench.Result{}, err
		}
		base, rate = append(base, (b+b2)/2), append(rate, s)
		loaded.add(t)
	}
	_, idle, err := r.load(ctx, workspaces[:perClient], opts.Length)
	if err != nil {
		return bench.Result{}, err
	}
	value, baseline := mean(rate), mean(base)
	details["baseline"] = fmt.Sprintf("single-row commits/s, %d clients, one round trip each", baselineClients)
	details["baseline_rounds"], details["value_rounds"] = rounded(base), rounded(rate)
	details["aim"] = Aim
	details["steps_per_run"], details["clients"], details["workers"] = stepCount, opts.Clients, opts.Workers
	details["loaded_start_to_done_ms_p50"], details["loaded_start_to_done_ms_p95"] = bench.Percentile(loaded.done, .5), bench.Percentile(loaded.done, .95)
	details["idle_start_to_done_ms_p50"], details["idle_start_to_done_ms_p95"] = bench.Percentile(idle.done, .5), bench.Percentile(idle.done, .95)
	details["idle_start_to_claimed_ms_p50"], details["idle_start_to_claimed_ms_p95"] = bench.Percentile(idle.claimed, .5), bench.Percentile(idle.claimed, .95)
	ratio := value / baseline
	return bench.Result{
		Name: "sagas", Value: math.Round(value*10) / 10, Unit: "runs/s", Baseline: math.Round(baseline), Ratio: ratio, Required: Required,
		Passed: ratio >= Required, Details: details,
	}, nil
}

// start brings up the core, one driver and the sequencer; stop ends them.
func start(ctx context.Context, opts Options) (*rig, func(), error) {
	r := &rig{runs: map[string]*watched{}, early: map[string]time.Time{}, ended: map[string]time.Time{}}
	var err error
	if r.pool, err = pg.Open(ctx, pg.Config{URL: opts.LifecycleURL, ApplicationName: "bench sagas", MaxConns: 24, MinConns: 24, Settings: saga.PoolSettings()}); err != nil {
		return nil, nil, err
	}
	sequencerPool, err := pg.Open(ctx, pg.Config{URL: opts.SequencerURL, ApplicationName: "bench sequencer", MaxConns: 3})
	if err != nil {
		return nil, nil, err
	}
	appended := &events.Signal{}
	sequencer, err := events.NewSequencer(events.SequencerDeps{Pool: sequencerPool, Wake: appended, Logger: opts.Logger}, events.SequencerConfig{})
	if err != nil {
		return nil, nil, fmt.Errorf("make sequencer: %w", err)
	}
	steps := make([]saga.Step, stepCount)
	for i := range steps {
		steps[i] = saga.Step{
			Name: fmt.Sprintf("noop %d", i+1), Class: saga.Pure,
			Do: func(context.Context, *saga.Env) (saga.Outcome, error) { return saga.Done(nil), nil },
		}
	}
	registry, err := saga.NewRegistry(saga.Definition{Name: definition, Version: 1, Steps: steps, States: saga.WorkspaceStates{
		Running: commonv1.WorkspaceState_WORKSPACE_STATE_RECREATING, Succeeded: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
		Failed: commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
	}})
	if err != nil {
		return nil, nil, err
	}
	if r.core, err = saga.New(saga.Deps{DB: r.pool, Registry: registry, Logger: opts.Logger, Appended: appended, OnPoint: r.onPoint}); err != nil {
		return nil, nil, err
	}
	driver, err := saga.NewDriver(r.core, saga.Config{Owner: "bench-" + ids.New(), Workers: opts.Workers, LeaseBatch: opts.Workers})
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	var loops sync.WaitGroup
	for name, run := range map[string]func(context.Context) error{"driver": driver.Run, "sequencer": sequencer.Run} {
		loops.Go(func() {
			if err := run(ctx); err != nil && !errors.Is(err, context.Canceled) {
				opts.Logger.ErrorContext(ctx, "bench loop failed", slog.String("loop", name), slog.String("error", err.Error()))
			}
		})
	}
	return r, func() {
		cancel()
		loops.Wait()
		r.pool.Close()
		sequencerPool.Close()
	}, nil
}

// onPoint stamps the commits of a run's lease and of its end.
func (r *rig) onPoint(_ context.Context, name string, at saga.Place) error {
	if name != "lease.opened" && name != "finish.after_commit" {
		return nil
	}
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	w := r.runs[at.RunID]
	switch {
	case name == "lease.opened" && w != nil:
		w.claimed = now
	case name == "lease.opened":
		r.early[at.RunID] = now
	case w != nil:
		w.done <- now
	default:
		r.ended[at.RunID] = now
	}
	return nil
}

// watch begins to wait for a run; what came before it was registered counts.
func (r *rig) watch(runID string) *watched {
	r.mu.Lock()
	defer r.mu.Unlock()
	w := &watched{done: make(chan time.Time, 1), claimed: r.early[runID]}
	if at, ok := r.ended[runID]; ok {
		w.done <- at
	}
	delete(r.early, runID)
	delete(r.ended, runID)
	r.runs[runID] = w
	return w
}

func (r *rig) forget(runID string) time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	claimed := r.runs[runID].claimed
	delete(r.runs, runID)
	return claimed
}

func (r *rig) workspaces(ctx context.Context, n int) ([]string, error) {
	tenant := ids.New()
	var out []string
	err := pg.InTx(ctx, r.pool, func(ctx context.Context, tx pgx.Tx) error {
		out = nil
		if _, err := tx.Exec(ctx, `INSERT INTO lifecycle.tenant (id, name) VALUES ($1, $2)`, tenant, "bench-"+tenant); err != nil {
			return fmt.Errorf("insert tenant: %w", err)
		}
		for i := range n {
			id, err := r.core.InsertWorkspace(ctx, tx, saga.NewWorkspace{TenantID: tenant, Name: fmt.Sprintf("bench-%d", i), CreatedBy: "bench"})
			if err != nil {
				return err
			}
			out = append(out, id)
		}
		return nil
	})
	return out, err
}

// timings are measured from the commit of the start.
type timings struct{ claimed, done []time.Duration }

func (t *timings) add(o timings) {
	t.claimed, t.done = append(t.claimed, o.claimed...), append(t.done, o.done...)
}

// load keeps one run open for each client, in turn on the workspaces of its own, for the length of time, and answers how many ended a second.
func (r *rig) load(ctx context.Context, workspaces []string, length time.Duration) (float64, timings, error) {
	var mu sync.Mutex
	var all timings
	var wg sync.WaitGroup
	errs := make(chan error, len(workspaces))
	begin := time.Now()
	stop := begin.Add(length)
	for first := range len(workspaces) / perClient {
		own := workspaces[first*perClient : (first+1)*perClient]
		wg.Go(func() {
			var seen timings
			for n := 0; time.Now().Before(stop); n++ {
				t, err := r.one(ctx, own[n%perClient])
				if err != nil {
					errs <- err
					break
				}
				seen.add(t)
			}
			mu.Lock()
			defer mu.Unlock()
			all.add(seen)
		})
	}
	wg.Wait()
	took := time.Since(begin)
	select {
	case err := <-errs:
		return 0, timings{}, err
	default:
		return float64(len(all.done)) / took.Seconds(), all, nil
	}
}

// one starts a run and waits for its end.
func (r *rig) one(ctx context.Context, workspace string) (timings, error) {
	var started saga.Started
	err := pg.InTx(ctx, r.pool, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		started, err = r.core.Start(ctx, tx, saga.StartRequest{
			WorkspaceID: workspace, Kind: commonv1.OperationKind_OPERATION_KIND_RECREATE, Definition: definition, Requester: "bench", NextEpoch: true,
		})
		return err
	})
	committed := time.Now()
	if err != nil {
		return timings{}, fmt.Errorf("start run: %w", err)
	}
	w := r.watch(started.RunID)
	r.core.Committed()
	select {
	case at := <-w.done:
		claimed := r.forget(started.RunID)
		return timings{claimed: []time.Duration{claimed.Sub(committed)}, done: []time.Duration{at.Sub(committed)}}, nil
	case <-time.After(30 * time.Second):
		return timings{}, fmt.Errorf("run %s did not end within 30 s", started.RunID)
	case <-ctx.Done():
		return timings{}, fmt.Errorf("wait for run: %w", ctx.Err())
	}
}

func mean(list []float64) float64 {
	sum := 0.0
	for _, v := range list {
		sum += v
	}
	return sum / float64(len(list))
}

func rounded(list []float64) []float64 {
	out := make([]float64, len(list))
	for i, v := range list {
		out[i] = math.Round(v*10) / 10
	}
	return out
}
