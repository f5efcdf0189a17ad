// Package cancel measures how long it takes from the request to cancel an operation until the context of the step that
// runs is cancelled, on any replica that drives it.
//
// It owns the load. Two replicas of lifecycle's saga engine, with its verbs, run over one Postgres that writes durably,
// with production's lease; they share nothing else. Cancels come at random phases of the heartbeats, at the replica
// that drives and at the other one, and for steps that are parked, as for an agent's task, until their undo begins. The
// worst p95 of these ways is the result. When replicas get no notifications from each other, the heartbeats alone must
// be quick enough.
package cancel

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpuaas/mesh/bench"
	"github.com/gpuaas/mesh/bench/rig"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/services/lifecycle/saga/drive"
)

// Most is the p95 from a cancel to the step's context, in milliseconds.
const Most = 6000.0

// baselineCommits are measured before the cancels, and after them. The baseline is the least that a cancel costs: one
// durable commit of a single row.
const baselineCommits = 200

// The ways of a cancel.
const (
	wayDriving = "at_its_driver"
	wayOther   = "at_the_other_replica"
	wayParked  = "of_a_parked_step"
	heartbeats = 3           // over which the cancels are spread
	patience   = time.Minute // after which a cancel that no step noticed, or a step that did not begin, ends the bench
)

// Options describes where and how much to measure. The three URLs name one database.
type Options struct {
	LifecycleURL string // role lifecycle
	SequencerURL string // role sequencer: the event log is numbered while sagas run
	OwnerURL     string // a role that may create a schema, for the baseline's table
	// HeartbeatAlone keeps notifications from the replicas, and one drives while the other gets the requests: a cancel is
	// noticed by the heartbeat alone.
	HeartbeatAlone bool
	Lease          time.Duration // of a run, three heartbeats; zero means production's
	Cancels        int           // zero means 180
	Logger         *slog.Logger
}

var defaults = Options{
	Lease: drive.Default().Lease, Cancels: 180, Logger: slog.New(slog.DiscardHandler),
}

// load is two replicas and the runs that are to be cancelled.
type load struct {
	opts     Options
	replicas [2]*replica
	runs     map[string]*run // by workspace; it does not change once runs are started
	list     []*run
}

// run is one operation that waits for its cancel.
type run struct {
	workspace, way string
	beginning      chan struct{} // closed when its step runs
	hearing        chan time.Time

	driver atomic.Int64 // index of the replica
	first  sync.Once
}

func (x *run) began(replica int) {
	x.driver.Store(int64(replica))
	x.first.Do(func() { close(x.beginning) })
}

func (x *run) drivenBy() int { return int(x.driver.Load()) }

func (x *run) heard(at time.Time) {
	select {
	case x.hearing <- at:
	default: // it was heard of before
	}
}

// Run runs the bench. Nothing of it stays in the database but rows of a tenant named bench.
func Run(ctx context.Context, opts Options) (bench.Result, error) {
	opts = config.Or(opts, defaults)
	base, err := rig.Open(ctx, opts.OwnerURL, 2)
	if err != nil {
		return bench.Result{}, err
	}
	defer base.Close(ctx)
	g := &load{opts: opts, runs: map[string]*run{}}
	defer g.close()
	for i := range g.replicas {
		if g.replicas[i], err = newReplica(ctx, opts, g.definitions(i), i == 0 || !opts.HeartbeatAlone); err != nil {
			return bench.Result{}, err
		}
	}
	if err := g.prepare(ctx); err != nil {
		return bench.Result{}, err
	}
	defer g.replicas[0].Start(ctx)()
	defer g.replicas[1].Start(ctx)()
	return g.measure(ctx, base)
}

func (g *load) close() {
	for _, r := range g.replicas {
		if r != nil {
			r.Close()
		}
	}
}

// prepare makes the workspaces.
func (g *load) prepare(ctx context.Context) error {
	workspaces, err := g.replicas[0].Workspaces(ctx, g.opts.Cancels)
	if err != nil {
		return err
	}
	for i, id := range workspaces {
		x := &run{workspace: id, way: wayOther, beginning: make(chan struct{}), hearing: make(chan time.Time, 1)}
		if !g.opts.HeartbeatAlone {
			x.way = []string{wayOther, wayDriving, wayParked}[i%3]
		}
		g.list, g.runs[id] = append(g.list, x), x
	}
	return nil
}

func (g *load) measure(ctx context.Context, base *rig.Rig) (bench.Result, error) {
	before, err := base.CommitTimes(ctx, baselineCommits)
	if err != nil {
		return bench.Result{}, err
	}
	for i, x := range g.list {
		if err := g.start(ctx, g.replicas[i%2], x); err != nil {
			return bench.Result{}, err
		}
	}
	drove := [2]int{}
	for _, x := range g.list {
		select {
		case <-x.beginning:
			drove[x.drivenBy()]++
		case <-time.After(patience):
			return bench.Result{}, fmt.Errorf("the step of workspace %s did not begin within %s", x.workspace, patience)
		case <-ctx.Done():
			return bench.Result{}, fmt.Errorf("wait for steps: %w", context.Cause(ctx))
		}
	}
	heard, answers, err := g.cancelAll(ctx)
	if err != nil {
		return bench.Result{}, err
	}
	after, err := base.CommitTimes(ctx, baselineCommits)
	if err != nil {
		return bench.Result{}, err
	}
	raw := slices.Concat(before, after)
	value := 0.0
	for way, took := range heard {
		base.Details[way+"_ms"] = rig.Times(took)
		value = max(value, bench.Percentile(took, .95))
	}
	name := "cancel"
	if g.opts.HeartbeatAlone {
		name = "cancel by heartbeats alone"
	}
	maps.Copy(base.Details, map[string]any{
		"baseline":          "p95 of one single-row commit, one client",
		"raw_commit_ms_p50": bench.Percentile(raw, .5),
		"answer_ms": fmt.Sprintf("p50 %.1f, p95 %.1f", bench.Percentile(answers, .5),
			bench.Percentile(answers, .95)),
		"cancels": len(g.list), "steps_driven_by_each": fmt.Sprint(drove[0], " and ", drove[1]),
		"lease": g.opts.Lease.String(), "heartbeat": (g.opts.Lease / 3).String(),
	})
	return base.AtMost(name, "ms p95 to the step's context", value, bench.Percentile(raw, .95), Most), nil
}

// start begins an operation of which the step lasts until it is cancelled.
func (g *load) start(ctx context.Context, r *replica, x *run) error {
	definition := working
	if x.way == wayParked {
		definition = parked
	}
	if _, err := r.Begin(ctx, x.workspace, definition); err != nil {
		return err
	}
	r.Core.Committed()
	return nil
}

// cancelAll cancels every run at a random moment of the next heartbeats, and returns by way how long each took to reach
// the step, and how long the answers took.
func (g *load) cancelAll(ctx context.Context) (map[string][]time.Duration, []time.Duration, error) {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	type sample struct{ heard, answered time.Duration }
	samples := make([]sample, len(g.list))
	var all sync.WaitGroup
	for i, x := range g.list {
		after := rand.N(heartbeats * g.opts.Lease / 3)
		all.Go(func() {
			if !app.Sleep(ctx, after) {
				return
			}
			asked := time.Now()
			if err := g.ask(ctx, x); err != nil {
				stop(err)
				return
			}
			samples[i].answered = time.Since(asked)
			select {
			case at := <-x.hearing:
				samples[i].heard = at.Sub(asked)
			case <-time.After(patience):
				stop(fmt.Errorf("a cancel %s was not heard of within %s", x.way, patience))
			case <-ctx.Done():
			}
		})
	}
	all.Wait()
	if ctx.Err() != nil {
		return nil, nil, fmt.Errorf("cancel: %w", context.Cause(ctx))
	}
	heard := map[string][]time.Duration{}
	var answers []time.Duration
	for i, x := range g.list {
		heard[x.way] = append(heard[x.way], samples[i].heard)
		answers = append(answers, samples[i].answered)
	}
	return heard, answers, nil
}

// ask cancels by the verb that people use, at the replica of the way.
func (g *load) ask(ctx context.Context, x *run) error {
	at := x.drivenBy()
	if x.way != wayDriving {
		at = 1 - at
	}
	_, err := g.replicas[at].server.RequestOperation(ctx, &lifecyclev1.RequestOperationRequest{
		Kind: commonv1.OperationKind_OPERATION_KIND_CANCEL, Requester: "bench",
		Target: &lifecyclev1.RequestOperationRequest_WorkspaceId{WorkspaceId: x.workspace},
	})
	if err != nil {
		return fmt.Errorf("ask to cancel: %w", err)
	}
	return nil
}
