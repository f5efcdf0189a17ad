// Package fence measures how long a decision about a node takes to reach its agent: from the request that holds,
// quarantines or fences a node to its closed session, and from the request that reactivates it to the next session; and
// how long a task takes that is queued for it then and whose hint is lost.
//
// The mesh is that of `gpuaas dev`: the four services in this process, Postgres, Redis and the agents beside it. The
// times at which sessions are closed and admitted are those in the logs of the agents. A request begins before its
// commit, so that no time is shorter than from the commit.
package fence

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/gpuaas/mesh/bench"
	"github.com/gpuaas/mesh/bench/rig"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/dev"
	"github.com/gpuaas/mesh/mesh/person"
)

// MostClosing and MostReturning are the p99, in milliseconds, from a decision to the closed session, and from a
// reactivation to the next one: the longest wait that an agent is given with its jitter (7.5 s), and the opening.
const (
	MostClosing   = 2_000.0
	MostReturning = 12_000.0
)

// longestWait is how long an agent that is shut out waits at most until it tries again.
const longestWait = 7500 * time.Millisecond

// patience is how long one change may take before the bench gives up.
const patience = time.Minute

// verbs shut a node out until it is reactivated.
var verbs = []recoveryv1.IdentityVerb{
	recoveryv1.IdentityVerb_IDENTITY_VERB_HOLD,
	recoveryv1.IdentityVerb_IDENTITY_VERB_QUARANTINE,
	recoveryv1.IdentityVerb_IDENTITY_VERB_FENCE,
}

// Options describes how to measure.
type Options struct {
	Nodes   int    // zero means 8
	Rounds  int    // in which each node is shut out once by each verb; zero means 3
	Agent   string // the agent's program; empty: beside this one
	Version string
	Logger  *slog.Logger
}

var defaults = Options{
	Nodes: 8, Rounds: 3, Logger: slog.New(slog.DiscardHandler),
}

// Run runs the bench.
func Run(ctx context.Context, opts Options) (bench.Result, error) {
	if opts.Nodes < 0 || opts.Rounds < 0 {
		return bench.Result{}, fmt.Errorf("bench fence: %d rounds of %d nodes", opts.Rounds, opts.Nodes)
	}
	opts = config.Or(opts, defaults)
	mesh, err := dev.New(ctx, dev.Deps{
		Logger: opts.Logger, Out: io.Discard, Err: io.Discard, Version: opts.Version, Began: time.Now(),
	}, dev.Config{Ephemeral: true, NoDemo: true, Nodes: opts.Nodes, AgentBinary: opts.Agent})
	if err != nil {
		return bench.Result{}, fmt.Errorf("build the mesh: %w", err)
	}
	var m measured
	if err := mesh.While(ctx, func(ctx context.Context) error { return m.measure(ctx, opts, mesh) }); err != nil {
		return bench.Result{}, err
	}
	details := bench.Machine()
	details["nodes"], details["rounds"] = opts.Nodes, opts.Rounds
	return m.evaluate(details), nil
}

// measured holds how long each change took, by verb.
type measured struct {
	mu       sync.Mutex
	closed   map[recoveryv1.IdentityVerb][]time.Duration // until the session was closed
	returned map[recoveryv1.IdentityVerb][]time.Duration // from the reactivation after that verb until the next session
	answers  []time.Duration                             // until a request was answered
	served   []time.Duration                             // of a task whose hint was lost
}

// measure shuts all nodes out and lets them in again, each at moments of its own.
func (m *measured) measure(ctx context.Context, opts Options, mesh *dev.Mesh) error {
	m.closed = map[recoveryv1.IdentityVerb][]time.Duration{}
	m.returned = map[recoveryv1.IdentityVerb][]time.Duration{}
	pool, err := openLifecycle(ctx, mesh)
	if err != nil {
		return err
	}
	defer pool.Close()
	group, ctx := errgroup.WithContext(ctx)
	for i, agent := range mesh.Agents() {
		group.Go(func() error {
			log, err := openLog(agent.LogPath())
			if err != nil {
				return err
			}
			defer log.Close()
			for step := range opts.Rounds * len(verbs) {
				if err := m.one(ctx, mesh.Client(), agent, log, verbs[(step+i)%len(verbs)]); err != nil {
					return fmt.Errorf("node %s: %w", agent.Name(), err)
				}
				took, err := serve(ctx, mesh, pool, agent.Name())
				if err != nil {
					return fmt.Errorf("node %s: %w", agent.Name(), err)
				}
				m.mu.Lock()
				m.served = append(m.served, took)
				m.mu.Unlock()
			}
			return nil
		})
	}
	return group.Wait()
}

// one shuts a node out, waits for a part of the time between two of its tries, and lets it in again.
func (m *measured) one(ctx context.Context, client *person.Client, agent *agents.Agent, log *agentLog,
	verb recoveryv1.IdentityVerb,
) error {
	closing, err := m.change(ctx, client, agent, log, verb, "session lost")
	if err != nil {
		return err
	}
	if !app.Sleep(ctx, rand.N(longestWait)) { // the phase of its tries
		return fmt.Errorf("let the node wait: %w", context.Cause(ctx))
	}
	returning, err := m.change(ctx, client, agent, log, recoveryv1.IdentityVerb_IDENTITY_VERB_REACTIVATE,
		"session admitted")
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed[verb], m.returned[verb] = append(m.closed[verb], closing), append(m.returned[verb], returning)
	return nil
}

// change requests a change of the node's identity, and returns the time from the request to a message of the agent's.
func (m *measured) change(ctx context.Context, client *person.Client, agent *agents.Agent, log *agentLog,
	verb recoveryv1.IdentityVerb, message string,
) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	asked := time.Now()
	_, err := client.Command.ChangeNodeIdentity(ctx, &readmodelv1.ChangeNodeIdentityRequest{
		Node: agent.Name(), Verb: verb, Reason: "bench",
	})
	if err != nil {
		return 0, fmt.Errorf("%s: %w", names.Of(verb), err)
	}
	answer := time.Since(asked)
	at, err := log.await(ctx, asked, message)
	if err != nil {
		return 0, fmt.Errorf("await %q after %s: %w", message, names.Of(verb), err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.answers = append(m.answers, answer)
	return at.Sub(asked), nil
}

// evaluate compares the measurements with the requirements, and puts the figures of each verb into details.
func (m *measured) evaluate(details map[string]any) bench.Result {
	var closed, returned []time.Duration
	for _, verb := range verbs {
		closed, returned = append(closed, m.closed[verb]...), append(returned, m.returned[verb]...)
		details["closed_after_"+names.Of(verb)+"_ms"] = times(m.closed[verb])
		details["returned_after_"+names.Of(verb)+"_ms"] = times(m.returned[verb])
	}
	closing, returning, serving := bench.Percentile(closed, .99), bench.Percentile(returned, .99),
		bench.Percentile(m.served, .99)
	maps.Copy(details, map[string]any{
		"baseline":  "ms p99 that a decision may take until the session is closed",
		"closed_ms": times(closed), "closed_ms_p99_most": MostClosing,
		"returned_ms": times(returned), "returned_ms_p99_most": MostReturning,
		"served_ms": times(m.served), "served_ms_p99_most": MostServing,
		"answer_ms": rig.Times(m.answers),
	})
	return bench.Result{
		Name: "fence", Value: closing, Unit: "ms p99 from a decision to the closed session", Baseline: MostClosing,
		Ratio: closing / MostClosing, Required: 1,
		Passed:  closing <= MostClosing && returning <= MostReturning && serving <= MostServing,
		Details: details,
	}
}

func times(took []time.Duration) string {
	return fmt.Sprintf("p50 %.0f, p99 %.0f, max %.0f of %d",
		bench.Percentile(took, .5), bench.Percentile(took, .99), bench.Percentile(took, 1), len(took))
}
