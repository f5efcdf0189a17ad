// Package disconnect measures how long the API needs to show a node as disconnected after its agent's stream broke.
//
// The mesh is one of separate processes: the four services in replicas, Postgres, Redis, and the agents. A stream is
// broken by SIGKILL of the agent's process, after which the kernel closes its connection. A loss of which no packet
// tells, as of a host without power, is not measured here: it is found by keepalive.
package disconnect

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/gpuaas/mesh/bench"
	"github.com/gpuaas/mesh/devstack/scratch"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/cluster"
	"github.com/gpuaas/mesh/mesh/halt"
	"github.com/gpuaas/mesh/mesh/person"
)

// The bounds, in milliseconds, from a broken stream until the API shows the node as disconnected.
const (
	MostMedian = 500.0
	MostP99    = 3_000.0
)

const (
	// asks is the time between two questions of the API about a node, and so how exact a measurement is.
	asks = 5 * time.Millisecond
	// longestConnected is how long a node stays connected before its stream is broken again: a random part of it.
	longestConnected = 2 * time.Second
	// patience is how long one change may take before the bench gives up.
	patience = time.Minute
)

// Options describes how to measure.
type Options struct {
	Nodes    int    // zero means 8
	Rounds   int    // how often the stream of each node is broken; zero means 25
	Replicas int    // of each service; zero means 2
	Programs string // directory of gpuaas and gpuaas-node-agent; empty: that of this program
	CacheDir string // searched for Postgres' binaries after the system's
	Logger   *slog.Logger
}

var defaults = Options{Nodes: 8, Rounds: 25, Replicas: 2, Logger: slog.New(slog.DiscardHandler)}

// Run runs the bench.
func Run(ctx context.Context, opts Options) (bench.Result, error) {
	if opts.Nodes < 0 || opts.Rounds < 0 || opts.Replicas < 0 {
		return bench.Result{}, errors.New("bench disconnect: a number below zero")
	}
	opts = config.Or(opts, defaults)
	if opts.Programs == "" {
		self, err := os.Executable()
		if err != nil {
			return bench.Result{}, fmt.Errorf("find own program: %w", err)
		}
		opts.Programs = filepath.Dir(self)
	}
	dir, err := scratch.Make(halt.Bench)
	if err != nil {
		return bench.Result{}, err
	}
	m := measured{opts: opts}
	err = m.while(ctx, filepath.Join(dir.Path(), "mesh"))
	if err = errors.Join(err, dir.Remove()); err != nil {
		return bench.Result{}, err
	}
	details := bench.Machine()
	details["nodes"], details["rounds"], details["replicas"] = opts.Nodes, opts.Rounds, opts.Replicas
	return m.evaluate(details), nil
}

// measured holds how long each change took until the API showed it.
type measured struct {
	opts Options

	mu     sync.Mutex
	broken []time.Duration // since the SIGKILL of an agent
	back   []time.Duration // since the start of its process
}

// while starts the mesh, measures, and ends the mesh.
func (m *measured) while(ctx context.Context, dir string) error {
	c, err := cluster.New(ctx, m.opts.Logger, cluster.Config{
		Dir: dir, Programs: m.opts.Programs, CacheDir: m.opts.CacheDir, Replicas: m.opts.Replicas, Nodes: m.opts.Nodes,
		LogLevel: "warn",
	})
	if err != nil {
		return fmt.Errorf("build the mesh: %w", err)
	}
	kept, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var keeping sync.WaitGroup
	var keepErr error
	keeping.Go(func() { keepErr = c.Keep(kept) })
	if err = c.Start(ctx); err == nil {
		err = m.measure(ctx, c)
	}
	if err != nil {
		err = errors.Join(err, fmt.Errorf("the services' logs end with:\n%s", c.Tails(8)))
	}
	cancel()
	keeping.Wait()
	return errors.Join(err, keepErr, c.Close(context.WithoutCancel(ctx)))
}

// measure breaks the streams of all nodes, each at moments of its own.
func (m *measured) measure(ctx context.Context, c *cluster.Cluster) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, agent := range c.Nodes {
		group.Go(func() error {
			for range m.opts.Rounds {
				if err := m.one(ctx, c.Client, agent); err != nil {
					return fmt.Errorf("node %s: %w", agent.Name(), err)
				}
			}
			return nil
		})
	}
	return group.Wait()
}

// one breaks the stream of a node once, and lets the node come back.
func (m *measured) one(ctx context.Context, client *person.Client, agent *agents.Agent) error {
	if !app.Sleep(ctx, rand.N(longestConnected)) {
		return fmt.Errorf("let the node rest: %w", context.Cause(ctx))
	}
	agent.LetDie()
	killed := time.Now()
	if err := agent.Kill9(); err != nil {
		return err
	}
	broken, err := until(ctx, client, agent.Name(), killed, false)
	if err != nil {
		return err
	}
	started := time.Now()
	if err := agent.Start(); err != nil {
		return err
	}
	back, err := until(ctx, client, agent.Name(), started, true)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.broken, m.back = append(m.broken, broken), append(m.back, back)
	return nil
}

// until returns the time from a moment to the first answer of the API that shows a node as connected, or as not.
func until(ctx context.Context, client *person.Client, name string, from time.Time, connected bool,
) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		answer, err := client.Query.GetNode(ctx, &readmodelv1.GetNodeRequest{Node: name})
		if err != nil {
			return 0, fmt.Errorf("read the node: %w", err)
		}
		if answer.GetNode().GetConnected() == connected {
			return time.Since(from), nil
		}
		if !app.Sleep(ctx, asks) {
			return 0, fmt.Errorf("await connected %v: %w", connected, context.Cause(ctx))
		}
	}
}

// evaluate compares the measurements with the bounds.
func (m *measured) evaluate(details map[string]any) bench.Result {
	median, p99 := bench.Percentile(m.broken, .5), bench.Percentile(m.broken, .99)
	details["baseline"] = "ms at p99 that the API may need"
	details["disconnected_ms"] = times(m.broken)
	details["disconnected_ms_p50_most"], details["disconnected_ms_p99_most"] = MostMedian, MostP99
	details["connected_again_ms"] = times(m.back) // with the agent's start and its wait
	return bench.Result{
		Name: "disconnect", Value: p99, Unit: "ms p99 from a broken stream until the API shows it", Baseline: MostP99,
		Ratio: p99 / MostP99, Required: 1, Passed: median <= MostMedian && p99 <= MostP99, Details: details,
	}
}

func times(took []time.Duration) string {
	return fmt.Sprintf("p50 %.0f, p99 %.0f, max %.0f of %d",
		bench.Percentile(took, .5), bench.Percentile(took, .99), bench.Percentile(took, 1), len(took))
}
