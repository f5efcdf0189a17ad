// Package streams measures the memory that nodeapi needs for each connected, ready, heartbeating agent, against a bare
// grpc-go stream over mutual TLS.
//
// Server, baseline and agents are processes of their own; this one stands in for recovery and lifecycle, so that the
// server holds nothing but nodeapi.
package streams

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"time"

	"github.com/gpuaas/mesh/bench"
	"github.com/gpuaas/mesh/bench/process"
	"github.com/gpuaas/mesh/bench/rig"
	"github.com/gpuaas/mesh/devstack/scratch"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/nodeapi/nodeapitest"
)

// Required is the most that our memory may be of the baseline's, RequiredBytes the most for each agent; Aim and
// AimBytes are the goals of the design.
const (
	Required      = 1.05
	RequiredBytes = 48_500
	Aim           = 1.0
	AimBytes      = 40_000
)

// Options describes the servers and the load.
type Options struct {
	Agents   int             // default 5000
	Database *bench.Database // where the replica writes its facts
	Command  process.Command // makes a child of this binary
	Logger   *slog.Logger
	Every    time.Duration // between heartbeats; default 15 s
	Warmup   time.Duration // after the last agent's first acknowledged heartbeat; default 5 s
}

var defaults = Options{
	Agents: 5000, Every: 15 * time.Second, Warmup: 5 * time.Second, Logger: slog.New(slog.DiscardHandler),
}

// mesh is the environment of the measured servers.
type mesh struct {
	opts   Options
	dir    string
	trust  trust
	server serverConfig
}

// Run measures the baseline and then nodeapi.
func Run(ctx context.Context, opts Options) (bench.Result, error) {
	opts = config.Or(opts, defaults)
	if opts.Database == nil || opts.Command == nil {
		return bench.Result{}, errors.New("bench streams: no database or no command")
	}
	db, err := rig.Open(ctx, opts.Database.URL(pg.RoleOwner), 2)
	if err != nil {
		return bench.Result{}, err
	}
	defer db.Close(ctx)
	details := db.Details
	dir, err := scratch.Make("bench")
	if err != nil {
		return bench.Result{}, err
	}
	defer func() { _ = dir.Remove() }()
	r := &mesh{opts: opts, dir: dir.Path()}
	stop, err := r.surround(ctx)
	if err != nil {
		return bench.Result{}, err
	}
	defer stop()
	base, err := r.measure(ctx, childBare, false)
	if err != nil {
		return bench.Result{}, fmt.Errorf("measure baseline: %w", err)
	}
	ours, err := r.measure(ctx, childNodeAPI, true)
	if err != nil {
		return bench.Result{}, fmt.Errorf("measure nodeapi: %w", err)
	}
	ratio := ours.perAgent / base.perAgent
	ours.describe("nodeapi", details)
	base.describe("baseline", details)
	maps.Copy(details, map[string]any{
		"agents": opts.Agents, "heartbeat_interval": opts.Every.String(), "aim": Aim,
		"required_bytes": RequiredBytes, "aim_bytes": AimBytes,
		"baseline": "bare grpc-go bidi stream, mutual TLS 1.3, transport options as nodeapi's",
		"measure":  "RSS after two collections, minus the same at zero agents, by agents",
	})
	return bench.Result{
		Name: "streams", Value: round(ours.perAgent), Unit: "bytes/agent", Baseline: round(base.perAgent), Ratio: ratio,
		Required: Required, Passed: ratio <= Required && ours.perAgent <= RequiredBytes, Details: details,
	}, nil
}

// surround brings up recovery, lifecycle and all certificates.
func (r *mesh) surround(ctx context.Context) (func(), error) {
	nodes, err := nodeapitest.NewAuthority("nodes")
	if err != nil {
		return nil, err
	}
	services, err := nodeapitest.NewAuthority("services")
	if err != nil {
		return nil, err
	}
	if r.trust.Nodes, err = nodes.Encode(); err != nil {
		return nil, err
	}
	if r.trust.Services, err = services.Encode(); err != nil {
		return nil, err
	}
	if r.server.Files, err = nodeapitest.WriteFiles(r.dir, "nodeapi", nodes, services); err != nil {
		return nil, err
	}
	for role, path := range map[string]*string{pg.RoleNodeAPI: &r.server.Database, pg.RoleSequencer: &r.server.Sequencer} {
		*path = filepath.Join(r.dir, role)
		if err := os.WriteFile(*path, []byte(r.opts.Database.URL(role)), 0o600); err != nil {
			return nil, fmt.Errorf("write database url: %w", err)
		}
	}
	backend, err := nodeapitest.NewBackend()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	if r.server.Recovery, r.server.Lifecycle, err = backend.Listen(ctx, r.opts.Logger, services); err != nil {
		cancel()
		return nil, err
	}
	done := make(chan error, 1)
	go func() { done <- backend.Run(ctx) }() // awaited by the answer
	return func() {
		cancel()
		if err := <-done; err != nil {
			r.opts.Logger.Warn("bench plane failed", slog.Any("error", err))
		}
	}, nil
}

// footprint is the memory of a server without and with agents.
type footprint struct {
	zero, full process.Memory
	perAgent   float64
	agents     int
	connected  time.Duration
}

func (f footprint) describe(name string, details map[string]any) {
	per := func(full, zero int64) float64 { return round(float64(full-zero) / float64(f.agents)) }
	maps.Copy(details, map[string]any{
		name + "_rss_zero_mib": mib(f.zero.RSS), name + "_rss_full_mib": mib(f.full.RSS),
		name + "_heap_per_agent":       per(f.full.Heap, f.zero.Heap),
		name + "_stacks_per_agent":     per(f.full.Stacks, f.zero.Stacks),
		name + "_goroutines_per_agent": per(int64(f.full.Goroutines), int64(f.zero.Goroutines)),
		name + "_connected_in_s":       round(f.connected.Seconds()),
	})
}

// measure starts a server and its load, and reads the memory of the server.
func (r *mesh) measure(ctx context.Context, kind string, sessions bool) (footprint, error) {
	f := footprint{agents: r.opts.Agents}
	server, err := process.Start(r.opts.Command, kind)
	if err != nil {
		return f, err
	}
	defer server.Stop()
	load, err := process.Start(r.opts.Command, childAgents)
	if err != nil {
		return f, err
	}
	defer load.Stop()
	const soon = time.Minute
	var addr string
	if err := server.Ask(ctx, soon, "start", r.server, &addr); err != nil {
		return f, err
	}
	if err := load.Ask(ctx, soon, "trust", r.trust, nil); err != nil {
		return f, err
	}
	// A few agents come and go first: memory that is allocated once is not charged to the counted agents.
	if err := r.bring(ctx, load, agentsConfig{
		Addr: addr, N: min(64, r.opts.Agents), Sessions: sessions,
		Every: 200 * time.Millisecond,
	}); err != nil {
		return f, err
	}
	if err := load.Ask(ctx, soon, "leave", nil, nil); err != nil {
		return f, err
	}
	if err := pause(ctx, r.opts.Warmup); err != nil {
		return f, err
	}
	if err := server.Ask(ctx, soon, "measure", nil, &f.zero); err != nil {
		return f, err
	}
	began := time.Now()
	if err := r.bring(ctx, load, agentsConfig{
		Addr: addr, N: r.opts.Agents, Sessions: sessions,
		Every: r.opts.Every,
	}); err != nil {
		return f, err
	}
	f.connected = time.Since(began)
	if err := pause(ctx, r.opts.Warmup); err != nil {
		return f, err
	}
	if err := server.Ask(ctx, soon, "measure", nil, &f.full); err != nil {
		return f, err
	}
	var alive int64
	if err := load.Ask(ctx, soon, "status", nil, &alive); err != nil {
		return f, err
	}
	f.perAgent = float64(f.full.RSS-f.zero.RSS) / float64(r.opts.Agents)
	return f, nil
}

// bring connects agents and waits until each has had a heartbeat acknowledged.
func (r *mesh) bring(ctx context.Context, load *process.Child, cfg agentsConfig) error {
	if err := load.Ask(ctx, 10*time.Minute, "connect", cfg, nil); err != nil {
		return err
	}
	if _, err := load.Await(ctx, 2*time.Minute+3*cfg.Every, "status", cfg.N); err != nil {
		return fmt.Errorf("await a heartbeat of each agent: %w", err)
	}
	return nil
}

func pause(ctx context.Context, d time.Duration) error {
	if !app.Sleep(ctx, d) {
		return fmt.Errorf("measure: %w", context.Cause(ctx))
	}
	return nil
}

func mib(n int64) float64 { return round(float64(n) / (1 << 20)) }

func round(v float64) float64 { return float64(int64(v*10+0.5)) / 10 }
