package cancel

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/bench/rig"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/services/lifecycle/operation"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

// The two definitions: a step that works until its context ends, and one that is parked, as for a task of an agent,
// until it is undone.
const (
	working = "bench_working"
	parked  = "bench_parked"
)

// replica is one of lifecycle, with the verbs that people use.
type replica struct {
	*rig.Replica
	server *operation.Server
}

// newReplica makes a replica; a replica that does not drive only answers requests.
func newReplica(ctx context.Context, opts Options, definitions []saga.Definition, drives bool) (*replica, error) {
	cfg := rig.ReplicaConfig{
		LifecycleURL: opts.LifecycleURL, SequencerURL: opts.SequencerURL, Conns: 16, Definitions: definitions,
		Lease: opts.Lease, Listens: !opts.HeartbeatAlone,
		Logger: opts.Logger,
	}
	if drives {
		cfg.Workers = opts.Cancels
	}
	r, err := rig.NewReplica(ctx, cfg)
	if err != nil {
		return nil, err
	}
	log, err := audit.New(audit.Deps{
		Logger: opts.Logger, Pool: r.Pool, Schema: pg.RoleLifecycle,
		Policy: policy.Fixed{Set: policy.Defaults()}, Wake: r.Appended,
	})
	if err != nil {
		r.Close()
		return nil, fmt.Errorf("make audit log: %w", err)
	}
	return &replica{r, operation.NewServer(operation.Deps{
		Logger: opts.Logger, DB: r.Pool, Core: r.Core, Policy: policy.Fixed{Set: policy.Defaults()}, Audit: log,
	})}, nil
}

// definitions returns the definitions of a replica: their steps record which replica drives them, and when the cancel
// reached them.
func (g *load) definitions(replica int) []saga.Definition {
	return []saga.Definition{
		{Name: working, Version: 1, States: rig.States, Steps: []saga.Step{{
			Name: "work", Class: saga.Pure,
			Do: func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
				x := g.runs[env.WorkspaceID]
				x.began(replica)
				<-ctx.Done()
				now := time.Now()
				if errors.Is(context.Cause(ctx), saga.ErrCancelRequested) {
					x.heard(now)
				}
				return saga.Outcome{}, context.Cause(ctx)
			},
			Undo: g.undo, // by then the context has ended, also that of a step whose driver had lost its lease
		}}},
		{Name: parked, Version: 1, States: rig.States, Steps: []saga.Step{{
			Name: "wait", Class: saga.Pure,
			Do: func(_ context.Context, env *saga.Env) (saga.Outcome, error) {
				g.runs[env.WorkspaceID].began(replica)
				return saga.Wait(saga.WaitFor{For: time.Hour, Why: "waiting for an agent", WakeOnSignal: true}), nil
			},
			Undo: g.undo,
		}}},
	}
}

func (g *load) undo(_ context.Context, env *saga.Env) (saga.Outcome, error) {
	g.runs[env.WorkspaceID].heard(time.Now())
	return saga.Done(nil), nil
}
