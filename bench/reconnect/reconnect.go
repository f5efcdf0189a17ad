// Package reconnect measures how long a fleet of agents needs to come back after all replicas of nodeapi were killed,
// against bare mutual-TLS handshakes of as many clients.
//
// The mesh is one of separate processes: the four services in replicas, Postgres and Redis. The agents are sessions of
// the product's agent in one process, with certificates that recovery issued, and without a disk. The bare clients and
// servers are processes of their own, with the same certificates, the same TLS configuration and the agents' waits.
package reconnect

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math"
	"path/filepath"
	"slices"
	"time"

	"github.com/gpuaas/mesh/bench"
	"github.com/gpuaas/mesh/bench/process"
	"github.com/gpuaas/mesh/devstack/scratch"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/mesh/halt"
)

// Required is how many times as long as bare handshakes the return of all agents may take.
const Required = 2

// Options describes the fleet.
type Options struct {
	Agents   int             // default 5000
	Replicas int             // of each service; default 2
	Rounds   int             // each kills the replicas of nodeapi once, and the bare servers once; default 3
	Programs string          // directory of gpuaas; empty: that of this program
	Command  process.Command // makes a child of this binary
	Version  string
	CacheDir string    // searched for Postgres' binaries after the system's
	Out      io.Writer // one line for each step; nil: none
	Logger   *slog.Logger
	// Stable is how long sessions stand before they are killed. By default so long that an agent begins with its shortest
	// wait again.
	Stable time.Duration
	// VerdictsAfter is how long after the last return verdicts are read. By default so long that each agent that was not
	// heard since is called down.
	VerdictsAfter time.Duration
}

// amnesty is how long a node is not judged after replicas began to listen, with a margin.
const amnesty = 15 * time.Second

var defaults = Options{
	Agents: 5000, Replicas: 2, Rounds: 3, Out: io.Discard, Logger: slog.New(slog.DiscardHandler),
	Stable: 31 * time.Second,
}

// within bounds the return of all agents, or of all bare clients.
const within = 10 * time.Minute

// Run runs the bench.
func Run(ctx context.Context, opts Options) (bench.Result, error) {
	if opts.Command == nil || opts.Agents < 0 || opts.Rounds < 0 || opts.Replicas < 0 {
		return bench.Result{}, errors.New("bench reconnect: no command, or a number below zero")
	}
	opts = config.Or(opts, defaults)
	opts.VerdictsAfter = max(opts.VerdictsAfter, 0)
	if opts.VerdictsAfter == 0 {
		opts.VerdictsAfter = policy.Defaults().HeartbeatStaleAfter() + amnesty
	}
	dir, err := scratch.Make(halt.Bench)
	if err != nil {
		return bench.Result{}, err
	}
	w := &world{opts: opts, dir: filepath.Join(dir.Path(), "mesh")}
	var result bench.Result
	err = w.while(ctx, func(ctx context.Context) error {
		var err error
		result, err = w.measure(ctx)
		return err
	})
	return result, errors.Join(err, dir.Remove())
}

// measure enrols and connects the agents, kills nodeapi and the bare servers in turn, and checks what the mesh made of
// it.
func (w *world) measure(ctx context.Context) (bench.Result, error) {
	if err := w.connect(ctx); err != nil {
		return bench.Result{}, err
	}
	var err error
	if w.log, err = w.openLog(ctx); err != nil {
		return bench.Result{}, err
	}
	defer w.log.close(ctx)
	var ours, bare []outage
	for round := range w.opts.Rounds {
		if err := w.pause(ctx, w.opts.Stable); err != nil {
			return bench.Result{}, err
		}
		one, err := w.killNodeAPI(ctx)
		if err != nil {
			return bench.Result{}, fmt.Errorf("round %d: %w", round+1, err)
		}
		w.say("round %d: nodeapi down for %.1f s, all agents back after %.2f s", round+1, one.down.Seconds(),
			one.took().Seconds())
		// What follows an admission, such as probes and projections, is not part of the baseline.
		if err := w.pause(ctx, w.opts.Stable); err != nil {
			return bench.Result{}, err
		}
		if err := w.readWork(ctx, &one); err != nil {
			return bench.Result{}, err
		}
		other, err := w.killBare(ctx, one.listens)
		if err != nil {
			return bench.Result{}, fmt.Errorf("round %d, bare: %w", round+1, err)
		}
		w.say("round %d: bare servers down for %.1f s, all clients back after %.2f s", round+1, other.down.Seconds(),
			other.took().Seconds())
		ours, bare = append(ours, one), append(bare, other)
	}
	last := ours[len(ours)-1]
	if err := w.pause(ctx, time.Until(last.all.Add(w.opts.VerdictsAfter))); err != nil {
		return bench.Result{}, err
	}
	blamed, err := w.check(ctx)
	if err != nil {
		return bench.Result{}, err
	}
	details := w.details
	if err := w.log.describe(ctx, details, w.opts.Agents, w.opts.Rounds); err != nil {
		return bench.Result{}, err
	}
	return evaluate(w.opts, ours, bare, blamed, details), nil
}

// evaluate compares the medians of the rounds.
func evaluate(opts Options, ours, bare []outage, blamed faults, details map[string]any) bench.Result {
	our, base := medianOf(ours), medianOf(bare)
	describe(details, "agents", ours)
	describe(details, "bare", bare)
	blamed.describe(details)
	maps.Copy(details, map[string]any{
		"agents": opts.Agents, "replicas": opts.Replicas, "rounds": opts.Rounds,
		"baseline": "bare mutual-TLS handshakes of as many clients: certificates, TLS and waits of the agents",
		"measure":  "from the first listener that accepts until the last client is back; medians of the rounds",
	})
	ratio := our / base
	return bench.Result{
		Name: "reconnect", Value: round(our), Unit: "s until all agents are admitted", Baseline: round(base), Ratio: ratio,
		Required: Required, Passed: ratio <= Required && blamed.none(), Details: details,
	}
}

// say writes a line about the progress of the bench.
func (w *world) say(format string, args ...any) { fmt.Fprintf(w.opts.Out, format+"\n", args...) }

func (w *world) pause(ctx context.Context, d time.Duration) error {
	if !app.Sleep(ctx, max(d, 0)) {
		return fmt.Errorf("let the mesh rest: %w", context.Cause(ctx))
	}
	return nil
}

// medianOf returns the median time of outages, in seconds.
func medianOf(list []outage) float64 {
	took := make([]time.Duration, 0, len(list))
	for _, o := range list {
		took = append(took, o.took())
	}
	slices.Sort(took)
	n := len(took)
	return (took[(n-1)/2] + took[n/2]).Seconds() / 2
}

func round(v float64) float64 { return math.Round(v*100) / 100 }
