package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/gen/gpuaas/common/v1/commonv1connect"
	"github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1/lifecyclev1connect"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/reannounce"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
	"github.com/gpuaas/mesh/services/lifecycle/findings"
	"github.com/gpuaas/mesh/services/lifecycle/findings/detect"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/operation"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/task"
	"github.com/gpuaas/mesh/services/lifecycle/task/dispatch"
	"github.com/gpuaas/mesh/services/lifecycle/tenants"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// build makes the parts of the service, each from those above it: here alone they meet.
func (s *Service) build(ctx context.Context) error {
	b := s.base
	p, err := s.openParts(ctx)
	if err != nil {
		return err
	}
	refusals, err := provision.NewEpochRefusals(p.metrics)
	if err != nil {
		return err
	}
	hub := dispatch.NewHub(b.Logger, b.DB, b.Numbered)
	tasks := p.tasks(hub, refusals)
	launches := p.launchLog()
	steps := p.steps(tasks, launches, refusals)
	core, err := p.core(steps, tasks)
	if err != nil {
		return err
	}
	driver, err := p.driver(core)
	if err != nil {
		return err
	}
	sealer, err := p.sealer(ctx)
	if err != nil {
		return err
	}
	finder, err := p.finder(ctx)
	if err != nil {
		return err
	}
	sweeps, err := p.sweeps(ctx, tasks, launches, finder)
	if err != nil {
		return err
	}
	sessions, err := p.batches(events.ConsumerConfig{
		Name: "sessions", Schema: "lifecycle", Kinds: []string{"session.changed"},
	}, applyAll)
	if err != nil {
		return err
	}
	woken, err := p.consumer(detect.WokenConsumer())
	if err != nil {
		return err
	}
	waiting, err := gate.NewWaiting(p.metrics)
	if err != nil {
		return err
	}
	cordons := gate.Cordons{Logger: b.Logger, Policy: b.Policy, Waiting: waiting}
	verdicts, err := p.batches(gate.VerdictConsumer(), cordons.OnVerdicts)
	if err != nil {
		return err
	}
	if err := s.serve(ctx, p, tasks, core, finder); err != nil {
		return err
	}
	b.Consumes(sessions.Name(), woken.Name(), verdicts.Name(), detect.ReportsConsumer)
	b.Add(
		app.Task{Name: "sagas", Phase: app.PhaseLeases, Run: func(ctx context.Context) error {
			launches.Await(ctx, func(ctx context.Context) bool { return app.Sleep(ctx, time.Second) })
			return driver.Run(ctx)
		}},
		app.Task{
			Name: "remote-wakes",
			Run:  func(ctx context.Context) error { return core.FollowRemoteWakes(ctx, b.Numbered) },
		},
		app.Task{Name: "work-hints", Run: hub.Run},
		app.Task{Name: "sessions", Run: func(ctx context.Context) error { return sessions.Run(ctx, apply) }},
		app.Task{Name: "verdicts", Run: func(ctx context.Context) error { return verdicts.Run(ctx, cordons.OnVerdict) }},
		app.Task{Name: "verdict-cordons", Run: func(ctx context.Context) error {
			return app.Every(ctx, b.Logger, "verdict-cordons", gate.ReleaseEvery, func(ctx context.Context) error {
				released, err := cordons.Release(ctx, b.DB)
				if released > 0 {
					p.wakes.Committed()
				}
				return errors.Join(err, cordons.Measure(ctx, b.DB))
			})
		}},
		app.Task{
			Name: "woken-instances",
			Run:  func(ctx context.Context) error { return woken.Run(ctx, detect.ApplyWoken) },
		},
		app.Task{Name: "woken-sweep", Run: func(ctx context.Context) error { return s.sweepWoken(ctx, finder) }},
		app.Task{Name: "task-sweep", Run: func(ctx context.Context) error { return s.sweepTasks(ctx, tasks) }},
		app.Task{Name: "seal-stored", Run: func(ctx context.Context) error { return s.sealStored(ctx, sealer, tasks) }},
		app.Task{Name: "finding-counts", Run: func(ctx context.Context) error {
			return app.Every(ctx, b.Logger, "finding-counts", s.cfg.FindingSweep, finder.Measure)
		}},
		app.Task{Name: "background", Run: sweeps.Run},
	)
	if s.instances != nil {
		b.Add(app.Task{Name: "instances", Run: s.instances.Keep})
	}
	return nil
}

// serve opens the port for other services and mounts what they call.
func (s *Service) serve(ctx context.Context, p *parts, tasks *dispatch.Server, core *saga.Core,
	finder *findings.Sweeper,
) error {
	outputs, err := p.outputs()
	if err != nil {
		return err
	}
	if s.server, err = s.base.InternalServer(ctx, p.persons); err != nil {
		return err
	}
	workspaces, mount, opts := p.workspaces(core), s.server.Mount, s.server.HandlerOptions()
	rows := reannounce.NewServer(s.base.DB, p.wakes.Committed, announced()...)
	err = errors.Join(
		mount(lifecyclev1connect.NewGateServiceHandler(p.gates(tasks), opts...)),
		mount(lifecyclev1connect.NewTaskServiceHandler(tasks, opts...)),
		mount(lifecyclev1connect.NewProbeServiceHandler(dispatch.NewProbes(tasks), opts...)),
		mount(lifecyclev1connect.NewDiagnosticsServiceHandler(tasks, opts...)),
		mount(lifecyclev1connect.NewFindingServiceHandler(findings.NewServer(finder, s.base.Audit), opts...)),
		mount(lifecyclev1connect.NewInstanceServiceHandler(p.instances(), opts...)),
		mount(lifecyclev1connect.NewOutputServiceHandler(outputs, opts...)),
		mount(commonv1connect.NewAnnounceServiceHandler(rows, opts...)),
		mount(lifecyclev1connect.NewAllocationServiceHandler(operation.NewAllocations(workspaces), opts...)),
		mount(lifecyclev1connect.NewWorkspaceServiceHandler(workspaces, opts...)))
	if err != nil {
		return fmt.Errorf("mount services: %w", err)
	}
	return nil
}

// announced returns the live rows of lifecycle, tenants before the rows that belong to them.
func announced() []reannounce.Source {
	return slices.Concat([]reannounce.Source{tenants.Announced()}, allocation.Announced(), workspace.Announced(),
		runs.Announced(), []reannounce.Source{claims.Announced(), gate.Announced(), task.Announced(), finding.Announced()})
}

// apply applies one of nodeapi's events about sessions.
func apply(ctx context.Context, tx pgx.Tx, r events.Record) error {
	return applyAll(ctx, tx, []events.Record{r})
}

// applyAll applies nodeapi's events about sessions.
func applyAll(ctx context.Context, tx pgx.Tx, records []events.Record) error {
	reports := make([]*nodev1.SessionChanged, len(records))
	for i, r := range records {
		reports[i] = &nodev1.SessionChanged{}
		if err := r.Decode(reports[i]); err != nil {
			return err
		}
	}
	if err := gate.CloseSessions(ctx, tx, reports...); err != nil {
		return err
	}
	return findings.ApplyHostFacts(ctx, tx, reports)
}

// sweepWoken checks the instances that agents refused, after each event and at the cadence of the configuration.
func (s *Service) sweepWoken(ctx context.Context, finder *findings.Sweeper) error {
	b := s.base
	pause := func() func(context.Context) bool {
		wake := b.Numbered.C() // an event reports each refusal that it reads
		return func(ctx context.Context) bool { return b.Numbered.Pace(ctx, nil, wake, s.cfg.WokenSweep) }
	}
	return app.EveryPaced(ctx, b.Logger, "woken-sweep", pause, uncounted(finder.SweepWoken))
}

// sweepTasks ends stale tasks at the cadence of the policy.
func (s *Service) sweepTasks(ctx context.Context, tasks *dispatch.Server) error {
	b := s.base
	return sweepAtPolicy(ctx, b.Logger, b.Policy, func(ctx context.Context, interval time.Duration) error {
		swept, err := tasks.Sweep(ctx)
		if swept.Expired+swept.Unknown > 0 {
			b.Logger.InfoContext(ctx, "stale tasks swept", slog.Int("expired", swept.Expired),
				slog.Int("outcome_unknown", swept.Unknown))
		}
		return errors.Join(err, tasks.EndBacklogs(ctx, interval))
	})
}

// sweepAtPolicy calls sweep after each interval of the policy, with that interval, until ctx ends. The policy is read
// before each pause.
func sweepAtPolicy(ctx context.Context, logger *slog.Logger, reader policy.Reader,
	sweep func(ctx context.Context, interval time.Duration) error,
) error {
	for {
		interval := reader.Current().TaskStaleSweepInterval()
		if !app.Sleep(ctx, interval) {
			return nil
		}
		if err := sweep(ctx, interval); err != nil && ctx.Err() == nil {
			logger.WarnContext(ctx, "stale tasks not swept", obs.Err(err))
		}
	}
}
