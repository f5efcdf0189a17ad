// Package sagas measures runs of six no-op steps per second against the single-row commits per second of the same
// Postgres.
package sagas

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/gpuaas/mesh/bench"
	"github.com/gpuaas/mesh/bench/pending"
	"github.com/gpuaas/mesh/bench/rig"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

// Required is the least ratio of runs to commits; Aim is the goal of the design.
const (
	Required = 0.02
	Aim      = 0.035
)

// MaxWAL bounds the bytes of the write-ahead log that a run costs.
const MaxWAL = 13_000

const (
	stepCount  = 6
	definition = "bench"
	// perClient is how many workspaces a client has: no mesh runs hundreds of operations a second on one.
	perClient = 32
)

// Options describes where and how long to measure. The three URLs name one database.
type Options struct {
	LifecycleURL string // role lifecycle
	SequencerURL string // role sequencer: the event log is numbered while sagas run
	OwnerURL     string // a role that may create a schema, for the baseline's table
	Logger       *slog.Logger
	// Length of each measured stretch; zero means 4 s. There are Rounds stretches of each kind in turn; zero means 3.
	Length time.Duration
	Rounds int
	// Clients start runs, each on a workspace of its own, and wait for them; zero means 64, as in published benchmarks of
	// other engines. Workers drive them; zero means 64.
	Clients, Workers int
}

var defaults = Options{
	Length: 4 * time.Second, Rounds: 3, Clients: 64, Workers: 64, Logger: slog.New(slog.DiscardHandler),
}

// Load is a replica of lifecycle, workspaces, and the runs that are under way on them.
type Load struct {
	replica    *rig.Replica
	workspaces []string
	stop       func()

	leased, ended *pending.Units[string] // runs
}

// Run runs the bench. Nothing of it stays in the database but archived rows of a tenant named bench.
func Run(ctx context.Context, opts Options) (bench.Result, error) {
	opts = config.Or(opts, defaults)
	base, err := rig.Open(ctx, opts.OwnerURL, rig.RateClients)
	if err != nil {
		return bench.Result{}, err
	}
	defer base.Close(ctx)
	r, err := Open(ctx, opts)
	if err != nil {
		return bench.Result{}, err
	}
	defer r.Close()
	var loaded timings
	rates, err := base.Alternate(ctx, opts.Rounds, opts.Length,
		func(ctx context.Context, length time.Duration) (float64, error) {
			took, elapsed, err := r.run(ctx, r.workspaces, length)
			loaded.add(took)
			return float64(len(took.done)) / elapsed.Seconds(), err
		})
	if err != nil {
		return bench.Result{}, err
	}
	idle, _, err := r.run(ctx, r.workspaces[:perClient], opts.Length)
	if err != nil {
		return bench.Result{}, err
	}
	maps.Copy(base.Details, map[string]any{
		"aim": Aim, "steps_per_run": stepCount, "clients": opts.Clients, "workers": opts.Workers,
		"loaded_start_to_done_ms_p50":  bench.Percentile(loaded.done, .5),
		"loaded_start_to_done_ms_p95":  bench.Percentile(loaded.done, .95),
		"idle_start_to_done_ms_p50":    bench.Percentile(idle.done, .5),
		"idle_start_to_done_ms_p95":    bench.Percentile(idle.done, .95),
		"idle_start_to_claimed_ms_p50": bench.Percentile(idle.claimed, .5),
		"idle_start_to_claimed_ms_p95": bench.Percentile(idle.claimed, .95),
		"wal_bytes_per_unit_most":      MaxWAL,
	})
	result := base.AtLeast("sagas", "runs/s", rates, Required)
	log, known := base.Details["wal_bytes_per_unit"].(float64)
	result.Passed = result.Passed && known && log <= MaxWAL
	return result, nil
}

// Open makes the replica and the workspaces, and runs it until its statements are prepared and its pools are filled.
// Close ends it.
func Open(ctx context.Context, opts Options) (*Load, error) {
	opts = config.Or(opts, defaults)
	r := &Load{leased: pending.New[string](), ended: pending.New[string]()}
	steps := make([]saga.Step, stepCount)
	for i := range steps {
		steps[i] = saga.Step{
			Name: fmt.Sprintf("noop %d", i+1), Class: saga.Pure,
			Do: func(context.Context, *saga.Env) (saga.Outcome, error) { return saga.Done(nil), nil },
		}
	}
	var err error
	r.replica, err = rig.NewReplica(ctx, rig.ReplicaConfig{
		LifecycleURL: opts.LifecycleURL, SequencerURL: opts.SequencerURL, Conns: 24, Workers: opts.Workers,
		Logger: opts.Logger, OnPoint: r.onPoint,
		Definitions: []saga.Definition{{Name: definition, Version: 1, Steps: steps, States: rig.States}},
	})
	if err != nil {
		return nil, err
	}
	r.stop = r.replica.Start(ctx)
	if r.workspaces, err = r.replica.Workspaces(ctx, opts.Clients*perClient); err == nil {
		_, _, err = r.run(ctx, r.workspaces, time.Second)
	}
	if err != nil {
		r.Close()
		return nil, err
	}
	return r, nil
}

// Stretch measures one stretch with a number of clients, at most those of the options, each with one run at a time. It
// returns how long each run took from its start to its end, and the time until the last one ended.
func (r *Load) Stretch(ctx context.Context, clients int, length time.Duration) ([]time.Duration, time.Duration, error) {
	took, elapsed, err := r.run(ctx, r.workspaces[:min(clients*perClient, len(r.workspaces))], length)
	return took.done, elapsed, err
}

// Close ends the replica.
func (r *Load) Close() {
	r.stop()
	r.replica.Close()
}

// onPoint stamps the commits of a run's lease and of its end.
func (r *Load) onPoint(_ context.Context, name string, at saga.Place) error {
	switch name {
	case "lease.opened":
		r.leased.Ended(at.RunID, time.Now())
	case "finish.after_commit":
		r.ended.Ended(at.RunID, time.Now())
	}
	return nil
}

// timings are measured from the commit of the start.
type timings struct{ claimed, done []time.Duration }

func (t *timings) add(o timings) {
	t.claimed, t.done = append(t.claimed, o.claimed...), append(t.done, o.done...)
}

// run keeps one run open for each client, in turn on the workspaces of its own, for the length of time. It returns how
// long the runs took, and the time until the last one ended.
func (r *Load) run(ctx context.Context, workspaces []string, length time.Duration) (timings, time.Duration, error) {
	var mu sync.Mutex
	var all timings
	var clients errgroup.Group
	begin := time.Now()
	stop := begin.Add(length)
	for first := range len(workspaces) / perClient {
		own := workspaces[first*perClient : (first+1)*perClient]
		clients.Go(func() error {
			var seen timings
			for n := 0; time.Now().Before(stop); n++ {
				t, err := r.one(ctx, own[n%perClient])
				if err != nil {
					return err
				}
				seen.add(t)
			}
			mu.Lock()
			defer mu.Unlock()
			all.add(seen)
			return nil
		})
	}
	err := clients.Wait()
	return all, time.Since(begin), err
}

// one starts a run and waits for its end.
func (r *Load) one(ctx context.Context, workspace string) (timings, error) {
	started, err := r.replica.Begin(ctx, workspace, definition)
	committed := time.Now()
	if err != nil {
		return timings{}, err
	}
	leased, ended := r.leased.Expect(started.RunID), r.ended.Expect(started.RunID)
	r.replica.Core.Committed()
	select {
	case at := <-ended:
		claimed := <-leased // before it ended
		return timings{claimed: []time.Duration{claimed.Sub(committed)}, done: []time.Duration{at.Sub(committed)}}, nil
	case <-time.After(30 * time.Second):
		return timings{}, fmt.Errorf("run %s did not end within 30 s", started.RunID)
	case <-ctx.Done():
		return timings{}, fmt.Errorf("wait for run: %w", ctx.Err())
	}
}
