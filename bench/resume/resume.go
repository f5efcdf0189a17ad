// Package resume measures how long an operation stands still when the process that drives it is killed: from the kill
// to the beginning of its step at another replica.
//
// It owns the load. A driver in a process of its own has leased a number of runs, each in the middle of a step, with
// production's lease, and is killed with SIGKILL at a random phase of its heartbeats; a second replica, which shares
// nothing with it but the database, takes over. Each round has a new driver and new runs.
package resume

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/gpuaas/mesh/bench"
	"github.com/gpuaas/mesh/bench/process"
	"github.com/gpuaas/mesh/bench/rig"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/drive"
)

// working is a definition of one step.
const working = "bench_working"

// Most is the p95 from a crash until the run goes on, in milliseconds.
const Most = 20_000.0

// patience is how long a step may take to begin before the bench gives up, beside a lease.
const patience = time.Minute

// Options describes where and how much to measure. The three URLs name one database.
type Options struct {
	LifecycleURL string // role lifecycle
	SequencerURL string // role sequencer: the event log is numbered while sagas run
	OwnerURL     string // a role that may create a schema, for the baseline's table
	Command      process.Command
	Lease        time.Duration // of a run, three heartbeats; zero means production's
	Runs         int           // that a driver holds when it is killed; zero means 40
	Kills        int           // zero means 3
	Logger       *slog.Logger
}

var defaults = Options{
	Lease: drive.Default().Lease, Runs: 40, Kills: 3, Logger: slog.New(slog.DiscardHandler),
}

// Run runs the bench. Nothing of it stays in the database but rows of tenants named bench.
func Run(ctx context.Context, opts Options) (bench.Result, error) {
	opts = config.Or(opts, defaults)
	base, err := rig.Open(ctx, opts.OwnerURL, 2)
	if err != nil {
		return bench.Result{}, err
	}
	defer base.Close(ctx)
	// The least that a resumption costs: one durable commit of a single row, which takes the run over.
	raw, err := base.CommitTimes(ctx, 200)
	if err != nil {
		return bench.Result{}, err
	}
	var stood []time.Duration
	var phases []string
	for range opts.Kills {
		phase := rand.N(opts.Lease / 3) // of the heartbeats
		took, err := round(ctx, opts, phase)
		if err != nil {
			return bench.Result{}, err
		}
		stood, phases = append(stood, took...), append(phases, phase.Round(time.Millisecond).String())
	}
	value := bench.Percentile(stood, .95)
	maps.Copy(base.Details, map[string]any{
		"baseline": "p95 of one single-row commit, one client",
		"stood_still_ms": fmt.Sprintf("p50 %.0f, p95 %.0f, max %.0f of %d", bench.Percentile(stood, .5), value,
			bench.Percentile(stood, 1), len(stood)),
		"kills": opts.Kills, "runs_held_at_each": opts.Runs, "killed_after_last_step_began": strings.Join(phases, " "),
		"lease": opts.Lease.String(), "heartbeat": (opts.Lease / 3).String(),
	})
	return base.AtMost("resume", "ms p95 from a crash until the run goes on", value, bench.Percentile(raw, .95), Most), nil
}

// newReplica makes a replica of lifecycle whose step does what do does.
func newReplica(ctx context.Context, opts Options, do saga.StepFunc) (*rig.Replica, error) {
	return rig.NewReplica(ctx, rig.ReplicaConfig{
		LifecycleURL: opts.LifecycleURL, SequencerURL: opts.SequencerURL, Conns: 16, Workers: opts.Runs, Lease: opts.Lease,
		Logger: opts.Logger,
		Definitions: []saga.Definition{{
			Name: working, Version: 1, States: rig.States, Steps: []saga.Step{{Name: "work", Class: saga.Pure, Do: do}},
		}},
	})
}

var countUnfinished = pg.Define(pg.RoleLifecycle, "resume.count_unfinished", `
	SELECT count(*) FROM lifecycle.saga_run WHERE workspace_id = ANY($1::uuid[]) AND state <> 'succeeded'`)

// round lets a driver take runs, kills it when that long has passed since the last of their steps began, and returns
// how long each stood still.
func round(ctx context.Context, opts Options, phase time.Duration) ([]time.Duration, error) {
	resumed := &tally{at: map[string]time.Time{}}
	survivor, err := newReplica(ctx, opts, func(_ context.Context, env *saga.Env) (saga.Outcome, error) {
		resumed.note(env.WorkspaceID)
		return saga.Done(nil), nil
	})
	if err != nil {
		return nil, err
	}
	defer survivor.Close()
	workspaces, err := start(ctx, survivor, opts.Runs)
	if err != nil {
		return nil, err
	}
	driver, err := process.Start(opts.Command, childDriver)
	if err != nil {
		return nil, err
	}
	defer driver.Stop()
	if err := driver.Ask(ctx, patience, "drive", driverConfig{
		LifecycleURL: opts.LifecycleURL, SequencerURL: opts.SequencerURL, Lease: opts.Lease, Runs: opts.Runs,
	}, nil); err != nil {
		return nil, err
	}
	if _, err := driver.Await(ctx, patience, "begun", len(workspaces)); err != nil {
		return nil, err
	}
	// The other replica runs as in production: it polls for runs all the while.
	defer survivor.Start(ctx)()
	if !app.Sleep(ctx, phase) {
		return nil, fmt.Errorf("await the kill: %w", context.Cause(ctx))
	}
	if n := resumed.count(); n > 0 {
		return nil, fmt.Errorf("%d runs were taken from a driver that lived", n)
	}
	killed := time.Now()
	if err := driver.Kill(); err != nil {
		return nil, err
	}
	err = until(ctx, opts.Lease+patience, "every run to go on",
		func() (bool, error) { return resumed.count() == len(workspaces), nil })
	if err != nil {
		return nil, err
	}
	took := make([]time.Duration, 0, len(workspaces))
	for _, w := range workspaces {
		at, ok := resumed.when(w)
		if !ok || at.Before(killed) {
			return nil, fmt.Errorf("the run of workspace %s went on before its driver died", w)
		}
		took = append(took, at.Sub(killed))
	}
	return took, until(ctx, patience, "every run to end", func() (bool, error) {
		left, err := pg.Value[int](ctx, survivor.Pool, countUnfinished, workspaces)
		return left == 0, err
	})
}

// start makes workspaces with a run each.
func start(ctx context.Context, r *rig.Replica, runs int) ([]string, error) {
	workspaces, err := r.Workspaces(ctx, runs)
	if err != nil {
		return nil, err
	}
	for _, w := range workspaces {
		if _, err := r.Begin(ctx, w, working); err != nil {
			return nil, err
		}
	}
	return workspaces, nil
}

// until polls until ask reports true.
func until(ctx context.Context, within time.Duration, what string, ask func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	for {
		done, err := ask()
		if err != nil || done {
			return err
		}
		if !app.Sleep(ctx, 5*time.Millisecond) {
			return fmt.Errorf("wait for %s: %w", what, context.Cause(ctx))
		}
	}
}
