// Package tasks measures durable round trips of tasks per second against the single-row commits per second of the same
// Postgres.
//
// A round trip is: committed enqueue, signed offer over the stream, the agent's ledger on disk, result committed,
// acknowledged. lifecycle's task and gate servers, nodeapi and the agents' ledger, executor and session are the real
// ones, over loopback with mutual TLS; the agents are a process of their own. A stand-in in memory answers for
// recovery: no task passes through it.
package tasks

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"math"
	"path/filepath"
	"time"

	"github.com/gpuaas/mesh/bench"
	"github.com/gpuaas/mesh/bench/pending"
	"github.com/gpuaas/mesh/bench/process"
	"github.com/gpuaas/mesh/bench/rig"
	"github.com/gpuaas/mesh/devstack/scratch"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/pg"
)

// Required is the least ratio of round trips to commits; Aim is the goal of the design. MaxP50 bounds the median at the
// steady rate, in ms.
const (
	Required = 0.1
	Aim      = 0.2
	MaxP50   = 10.0
)

// MaxSteadyProcessor and MaxLoadedProcessor bound the milliseconds of processor time that a task costs in all
// processes, at the steady rate and under full load; MaxWAL the bytes of the write-ahead log.
const (
	MaxSteadyProcessor = 4.26
	MaxLoadedProcessor = 1.04
	MaxWAL             = 3500
)

// Options describes the mesh and the load.
type Options struct {
	Agents   int             // default 200
	Database *bench.Database // ours and the baseline's
	Command  process.Command // makes a child of this binary
	Logger   *slog.Logger
	// Length of each measured stretch; default 5 s. There are Rounds of them, in turn with the baseline's; default 3.
	Length time.Duration
	Rounds int
	// Outstanding is how many tasks of a node wait at once under full load; default 16. Rate is the steady one; default
	// 200/s.
	Outstanding int
	Rate        int
}

var defaults = Options{
	Agents: 200, Rounds: 3, Outstanding: 16, Rate: 200, Length: 5 * time.Second,
	Logger: slog.New(slog.DiscardHandler),
}

// Run runs the bench.
func Run(ctx context.Context, opts Options) (bench.Result, error) {
	opts = config.Or(opts, defaults)
	if opts.Database == nil {
		return bench.Result{}, errNotGiven
	}
	base, err := rig.Open(ctx, opts.Database.URL(pg.RoleOwner), rig.RateClients)
	if err != nil {
		return bench.Result{}, err
	}
	defer base.Close(ctx)
	r, err := open(ctx, opts)
	if err != nil {
		return bench.Result{}, err
	}
	defer r.close()
	var loaded []time.Duration
	var full rig.Spent
	rates, err := base.Alternate(ctx, opts.Rounds, opts.Length,
		func(ctx context.Context, length time.Duration) (float64, error) {
			var took []time.Duration
			var elapsed time.Duration
			spent, err := base.Spend(ctx, []int{r.agents.PID()}, func(ctx context.Context) error {
				var err error
				took, elapsed, err = r.load(ctx, length)
				return err
			})
			full.Processor, full.WAL = full.Processor+spent.Processor, full.WAL+spent.WAL
			loaded = append(loaded, took...)
			return float64(len(took)) / max(elapsed.Seconds(), 1e-9), err
		})
	if err != nil {
		return bench.Result{}, err
	}
	var steady []time.Duration
	alone, err := base.Spend(ctx, []int{r.agents.PID()}, func(ctx context.Context) error {
		var err error
		steady, err = r.steady(ctx, 2*opts.Length)
		return err
	})
	if err != nil {
		return bench.Result{}, err
	}
	details := base.Details
	steadyProcessor, steadyWAL := alone.Of(len(steady))
	loadedProcessor, loadedWAL := full.Of(len(loaded))
	p50 := bench.Percentile(steady, .5)
	maps.Copy(details, map[string]any{
		"steady_cpu_ms_per_task": steadyProcessor, "steady_cpu_ms_per_task_most": MaxSteadyProcessor,
		"loaded_cpu_ms_per_task": loadedProcessor, "loaded_cpu_ms_per_task_most": MaxLoadedProcessor,
		"steady_wal_bytes_per_task": steadyWAL, "loaded_wal_bytes_per_task": loadedWAL, "wal_bytes_per_task_most": MaxWAL,
		"agents": opts.Agents, "outstanding_per_agent": opts.Outstanding, "aim": Aim, "steady_rate_per_s": opts.Rate,
		"steady_ms_p50": p50, "steady_ms_p99": bench.Percentile(steady, .99), "steady_ms_p50_most": MaxP50,
		"loaded_ms_p50": bench.Percentile(loaded, .5), "loaded_ms_p99": bench.Percentile(loaded, .99),
	})
	if err := r.describe(ctx, details); err != nil {
		return bench.Result{}, err
	}
	result := base.AtLeast("tasks", "round trips/s", rates, Required)
	result.Passed = result.Passed && p50 <= MaxP50 && steadyProcessor <= MaxSteadyProcessor &&
		loadedProcessor <= MaxLoadedProcessor &&
		max(steadyWAL, loadedWAL) <= MaxWAL
	return result, nil
}

var errNotGiven = errors.New("bench tasks: no database or no command")

// open brings up the mesh and runs it until its statements are prepared and its pools are filled. close ends it.
func open(ctx context.Context, opts Options) (*cluster, error) {
	if opts.Database == nil || opts.Command == nil {
		return nil, errNotGiven
	}
	dir, err := scratch.Make("bench")
	if err != nil {
		return nil, err
	}
	r := &cluster{opts: opts, dir: dir.Path(), ends: pending.New[string]()}
	stop, err := r.start(ctx)
	r.close = func() {
		stop()
		_ = dir.Remove()
	}
	if err == nil {
		_, _, err = r.load(ctx, time.Second)
	}
	if err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

// Load is a mesh for tasks that other benches measure.
type Load struct{ cluster *cluster }

// Open brings up the mesh and runs it until its statements are prepared and its pools are filled. Close ends it.
func Open(ctx context.Context, opts Options) (*Load, error) {
	r, err := open(ctx, config.Or(opts, defaults))
	if err != nil {
		return nil, err
	}
	return &Load{cluster: r}, nil
}

// Stretch measures one stretch with as many tasks open on each node as in the options. It returns how long each round
// trip took, and the time until the last one ended.
func (l *Load) Stretch(ctx context.Context, length time.Duration) ([]time.Duration, time.Duration, error) {
	return l.cluster.load(ctx, length)
}

// Agents returns the process of the agents.
func (l *Load) Agents() int { return l.cluster.agents.PID() }

// Close ends the mesh.
func (l *Load) Close() { l.cluster.close() }

// describe adds the commits of the ledgers, and the rate that their files allow.
func (r *cluster) describe(ctx context.Context, details map[string]any) error {
	var s ledgerStats
	if err := r.agents.Ask(ctx, time.Minute, "ledgers", nil, &s); err != nil {
		return err
	}
	var raw float64
	args := bboltConfig{Dir: r.dir, Files: r.opts.Agents, Length: r.opts.Length}
	if err := r.agents.Ask(ctx, 5*time.Minute, "bbolt", args, &raw); err != nil {
		return err
	}
	fs, _ := filepath.EvalSymlinks(r.dir) // then its place is not known
	done := float64(max(r.done.Load(), 1))
	maps.Copy(details, map[string]any{
		"ledger_commits_per_task": math.Round(100*float64(s.Commits)/done) / 100,
		"ledger_fsyncs_per_task":  math.Round(100*float64(s.Fsyncs)/done) / 100,
		"raw_bbolt_commits_per_s": math.Round(raw), "raw_bbolt_files": r.opts.Agents, "ledger_dir": filepath.Dir(fs),
	})
	return nil
}
