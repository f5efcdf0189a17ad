// Package tasks measures durable round trips of tasks per second against the single-row commits per second of the same Postgres.
//
// A round trip is: committed enqueue, signed offer over the stream, the agent's ledger on disk, result committed, acknowledged. lifecycle's task and gate
// servers, nodeapi and the agents' ledger, executor and session are the real ones, over loopback with mutual TLS; the agents are a process of their own.
// Recovery is answered by a plane in memory: no task goes by it.
package tasks

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"path/filepath"
	"time"

	"github.com/gpuaas/mesh/bench"
	"github.com/gpuaas/mesh/bench/process"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/scratch"
)

// Required is the least ratio of round trips to commits; Aim is what the design is after. MaxP50 bounds the median at the steady rate, in ms.
const (
	Required = 0.1
	Aim      = 0.2
	MaxP50   = 10.0
)

// Options says what to measure with.
type Options struct {
	Agents   int             // default 200
	Database *bench.Database // ours and the baseline's
	Command  process.Command // makes a child of this binary
	Logger   *slog.Logger
	// Length of each measured stretch; default 5 s. There are Rounds of them, in turn with the baseline's; default 3.
	Length time.Duration
	Rounds int
	// Outstanding is how many tasks of a node wait at once under full load; default 16. Rate is the steady one; default 200/s.
	Outstanding int
	Rate        int
}

func (o Options) withDefaults() Options {
	number := func(n *int, v int) {
		if *n == 0 {
			*n = v
		}
	}
	number(&o.Agents, 200)
	number(&o.Rounds, 3)
	number(&o.Outstanding, 16)
	number(&o.Rate, 200)
	if o.Length == 0 {
		o.Length = 5 * time.Second
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o
}

// Run measures.
func Run(ctx context.Context, opts Options) (bench.Result, error) {
	opts = opts.withDefaults()
	if opts.Database == nil || opts.Command == nil {
		return bench.Result{}, errors.New("bench tasks: no database or no command")
	}
	owner, err := pg.Open(ctx, pg.Config{URL: opts.Database.URL(pg.RoleOwner), ApplicationName: "bench baseline", MaxConns: baselineClients, MinConns: baselineClients})
	if err != nil {
		return bench.Result{}, fmt.Errorf("open database: %w", err)
	}
	defer owner.Close()
	details, err := bench.Environment(ctx, owner)
	if err != nil {
		return bench.Result{}, err //nolint:wrapcheck // it says what it read
	}
	if err := prepareBaseline(ctx, owner); err != nil {
		return bench.Result{}, err
	}
	defer func() { _ = dropBaseline(context.WithoutCancel(ctx), owner) }()
	dir, err := scratch.Make("bench")
	if err != nil {
		return bench.Result{}, err //nolint:wrapcheck // it says what it made
	}
	defer func() { _ = dir.Remove() }()
	r := &rig{opts: opts, dir: dir.Path(), waiting: map[string]*trip{}}
	stop, err := r.start(ctx)
	defer stop()
	if err != nil {
		return bench.Result{}, err
	}
	if _, _, err := r.load(ctx, time.Second); err != nil { // statements prepared, pools filled
		return bench.Result{}, err
	}
	var base, rate []float64
	var loaded []time.Duration
	for range opts.Rounds {
		before, err := commits(ctx, owner, opts.Length/2)
		if err != nil {
			return bench.Result{}, err
		}
		n, took, err := r.load(ctx, opts.Length)
		if err != nil {
			return bench.Result{}, err
		}
		after, err := commits(ctx, owner, opts.Length/2)
		if err != nil {
			return bench.Result{}, err
		}
		base, rate, loaded = append(base, (before+after)/2), append(rate, n), append(loaded, took...)
	}
	steady, err := r.steady(ctx, 2*opts.Length)
	if err != nil {
		return bench.Result{}, err
	}
	if err := r.describe(ctx, details); err != nil {
		return bench.Result{}, err
	}
	value, baseline := mean(rate), mean(base)
	p50 := bench.Percentile(steady, .5)
	details["baseline"] = fmt.Sprintf("single-row commits/s, %d clients, one round trip each", baselineClients)
	details["baseline_rounds"], details["value_rounds"] = rounded(base), rounded(rate)
	details["agents"], details["outstanding_per_agent"], details["aim"] = opts.Agents, opts.Outstanding, Aim
	details["steady_rate_per_s"] = opts.Rate
	details["steady_ms_p50"], details["steady_ms_p99"], details["steady_ms_p50_most"] = p50, bench.Percentile(steady, .99), MaxP50
	details["loaded_ms_p50"], details["loaded_ms_p99"] = bench.Percentile(loaded, .5), bench.Percentile(loaded, .99)
	ratio := value / baseline
	return bench.Result{
		Name: "tasks", Value: math.Round(value*10) / 10, Unit: "round trips/s", Baseline: math.Round(baseline), Ratio: ratio, Required: Required,
		Passed: ratio >= Required && p50 <= MaxP50, Details: details,
	}, nil
}

// describe adds what the ledgers did, and what their files can do at all.
func (r *rig) describe(ctx context.Context, details map[string]any) error {
	var s ledgerStats
	if err := r.agents.Ask(ctx, time.Minute, "ledgers", nil, &s); err != nil {
		return err //nolint:wrapcheck // it says what it asked
	}
	done := r.done.Load()
	details["ledger_commits_per_task"] = math.Round(100*float64(s.Commits)/float64(max(done, 1))) / 100
	details["ledger_fsyncs_per_task"] = math.Round(100*float64(s.Fsyncs)/float64(max(done, 1))) / 100
	var raw float64
	args := map[string]any{"Dir": r.dir, "Files": r.opts.Agents, "Length": r.opts.Length}
	if err := r.agents.Ask(ctx, 5*time.Minute, "bbolt", args, &raw); err != nil {
		return err //nolint:wrapcheck // it says what it asked
	}
	details["raw_bbolt_commits_per_s"] = math.Round(raw)
	details["raw_bbolt_files"] = r.opts.Agents
	var fs string
	if target, err := filepath.EvalSymlinks(r.dir); err == nil {
		fs = target
	}
	details["ledger_dir"] = filepath.Dir(fs)
	return nil
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
