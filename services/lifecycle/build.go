package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/common/v1/commonv1connect"
	"github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1/lifecyclev1connect"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/node/v1/nodev1connect"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/background"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/reannounce"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
	"github.com/gpuaas/mesh/services/lifecycle/findings"
	"github.com/gpuaas/mesh/services/lifecycle/findings/detect"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/launchlog"
	"github.com/gpuaas/mesh/services/lifecycle/operation"
	"github.com/gpuaas/mesh/services/lifecycle/outputs"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/reap"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/spec"
	"github.com/gpuaas/mesh/services/lifecycle/task"
	"github.com/gpuaas/mesh/services/lifecycle/task/dispatch"
	"github.com/gpuaas/mesh/services/lifecycle/tenants"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// build makes the parts of the service and wires them: here alone they meet.
func (s *Service) build(ctx context.Context) error {
	b := s.base
	m, err := s.material(ctx)
	if err != nil {
		return err
	}
	if err := s.openStores(ctx); err != nil {
		return err
	}
	joins, err := s.lockStore()
	if err != nil {
		return err
	}
	b.Health.Watch("lock_store", joins.Check)
	rc, err := b.Peer("recovery", s.cfg.Peers.Recovery, nil)
	if err != nil {
		return err
	}
	wakes := saga.NewWakes(b.Wake)
	stale, err := provision.NewEpochRefusals(b.Registry.ForService(b.Name))
	if err != nil {
		return err
	}
	hub := dispatch.NewHub(b.Logger, b.DB, b.Numbered)
	tasks := dispatch.NewServer(dispatch.Deps{
		Logger: b.Logger, DB: b.DB, Keys: m.tasks, Hub: hub,
		Wake: wakes.Wake, Committed: wakes.Committed, Superseded: stale.Tasks, Audit: b.Audit, Secrets: m.values,
	})
	drivers, err := s.drivers()
	if err != nil {
		return err
	}
	placementDefault, err := names.Parse[commonv1.PlacementDriver](s.cfg.DefaultPlacement)
	if err != nil {
		return fmt.Errorf("default placement: %w", err)
	}
	guard := launchlog.New(launchlog.Deps{
		Logger: b.Logger, DB: b.DB, Drivers: drivers,
		Recovery: recoveryv1connect.NewRollbackServiceClient(rc.HTTP, rc.BaseURL, rc.Options...),
	})
	catalogue := spec.Catalogue{
		Plans: s.cfg.Plans, Regions: s.cfg.Regions, Default: placementDefault,
		Placements: slices.Collect(maps.Keys(drivers)),
	}
	steps := provision.NewSteps(provision.StepDeps{
		EpochRefusals: stale, LaunchLog: guard,
		Logger: b.Logger, DB: b.DB, Workloads: s.workloads, Committed: wakes.Committed, Tasks: tasks,
		Identities: recoveryv1connect.NewInstanceServiceClient(rc.HTTP, rc.BaseURL, rc.Options...),
		Drivers:    drivers, Catalogue: catalogue, Secret: m.secret, Secrets: m.values,
		ReleaseDeadline: s.cfg.ReleaseDeadline, Policy: b.Policy,
	})
	registry, err := steps.Registry()
	if err != nil {
		return err
	}
	s.core, err = saga.New(saga.Deps{
		DB: b.DB, Registry: registry, Logger: b.Logger, Wakes: wakes, Stalls: steps.Stalls,
		Resumed: steps.Resumed, Resuming: task.LockOfRuns,
		Withdraw: tasks.Withdraw,
	})
	if err != nil {
		return fmt.Errorf("build saga core: %w", err)
	}
	if err := b.Registry.ForService(b.Name).Register(s.core.FencedWrites()); err != nil {
		return fmt.Errorf("register metric of fenced writes: %w", err)
	}
	sagaConfig := saga.Default()
	sagaConfig.Owner, sagaConfig.Workers = b.ReplicaID, s.cfg.Workers
	sagaConfig.GraceNow = func() time.Duration { return b.Policy.Current().SagaCancelGrace() }
	sagaConfig.Lease, sagaConfig.Heartbeat = s.cfg.SagaLease, s.cfg.SagaLease/3
	driver, err := saga.NewDriver(s.core, sagaConfig)
	if err != nil {
		return fmt.Errorf("build saga driver: %w", err)
	}
	gates := gate.NewServer(gate.Deps{
		Logger: b.Logger, DB: b.DB, Join: m.join, Tasks: tasks, Instances: allocation.Registrations{Wakes: wakes},
		Committed: wakes.Committed,
		Slots:     s.cfg.Placement.Static.SlotsPerNode,
	})
	reaper, err := reap.NewReaper(reap.ReaperDeps{
		Logger: b.Logger, DB: b.DB, Drivers: drivers, Metrics: b.Registry.ForService(b.Name), Committed: wakes.Committed,
		Identities: recoveryv1connect.NewInstanceServiceClient(rc.HTTP, rc.BaseURL, rc.Options...),
	})
	if err != nil {
		return err
	}
	sealer := &spec.Sealer{DB: b.DB, Secrets: m.values, Committed: wakes.Committed}
	if _, err := checkKeys(ctx, b.Logger, sealer, s.cfg.WorkloadSecretsLostKeys); err != nil {
		return err
	}
	scans, err := b.Pool(ctx, "findings", findings.Conns)
	if err != nil {
		return err
	}
	finder, err := findings.New(findings.Deps{
		Logger: b.Logger, DB: scans, Workloads: s.workloads, Drivers: drivers, Metrics: b.Registry.ForService(b.Name),
		Committed: wakes.Committed,
	}, findings.Config{Grace: s.cfg.FindingGrace})
	if err != nil {
		return err
	}
	shared := reap.NewSharedReaper(reap.SharedReaperDeps{
		Logger: b.Logger, DB: b.DB, Workloads: s.workloads, Committed: wakes.Committed,
		Identities: recoveryv1connect.NewInstanceServiceClient(rc.HTTP, rc.BaseURL, rc.Options...),
	})
	machines := reap.NewMachineReaper(reap.MachineReaperDeps{
		Logger: b.Logger, DB: b.DB, Tasks: tasks,
		Committed: wakes.Committed,
	})
	confirmer := &allocation.ClaimConfirmer{Logger: b.Logger, DB: b.DB, Committed: wakes.Committed}
	walk, err := b.Retention(ctx, cuts...)
	if err != nil {
		return err
	}
	sweeps, err := background.New(background.Deps{
		Pool: b.DB, Logger: b.Logger, Registerer: b.Registry.ForService(b.Name),
	},
		background.Job{
			Name: "orphans", Every: s.cfg.OrphanSweep, Timeout: sweepTimeout,
			Run: func(ctx context.Context) error {
				// Differences between the log and the database are reported to recovery before anything is ended.
				if err := guard.Check(ctx); err != nil {
					return err
				}
				_, err := reaper.Sweep(ctx)
				return err
			},
		},
		background.Job{
			Name: "machine_orphans", Every: s.cfg.OrphanSweep, Timeout: sweepTimeout,
			Run: func(ctx context.Context) error {
				_, err := machines.Sweep(ctx)
				return err
			},
		},
		background.Job{
			Name: "shared_orphans", Every: s.cfg.OrphanSweep, Timeout: sweepTimeout,
			Run: func(ctx context.Context) error {
				_, err := shared.Sweep(ctx)
				return err
			},
		},
		background.Job{Name: "claims", Every: s.cfg.OrphanSweep, Timeout: sweepTimeout, Run: func(ctx context.Context) error {
			_, err := confirmer.Sweep(ctx)
			return err
		}},
		walk,
		background.Job{
			Name: "findings", Every: s.cfg.FindingSweep, Timeout: sweepTimeout,
			Run: func(ctx context.Context) error {
				_, err := finder.Sweep(ctx)
				return err
			},
		},
		background.Job{
			Name: "two_instances", Every: s.cfg.FindingSweep, Timeout: twoTimeout,
			Run: func(ctx context.Context) error {
				_, err := finder.SweepTwoInstances(ctx)
				return err
			},
		})
	if err != nil {
		return err
	}
	workspaces := operation.NewServer(operation.Deps{
		Logger: b.Logger, DB: b.DB, Core: s.core, Catalogue: catalogue, Lock: joins, Policy: b.Policy, Audit: b.Audit,
		DefaultQuota: s.cfg.DefaultQuota,
		Secrets:      m.values,
	})
	if s.server, err = b.InternalServer(ctx, m.persons); err != nil {
		return err
	}
	instances := reap.NewInstances(reap.InstancesDeps{
		DB: b.DB, Drivers: drivers, Audit: b.Audit, Committed: wakes.Committed,
		Identities: recoveryv1connect.NewInstanceServiceClient(rc.HTTP, rc.BaseURL, rc.Options...),
	})
	nodeapi, err := b.Peers("nodeapi")
	if err != nil {
		return err
	}
	reader := outputs.NewServer(outputs.Deps{DB: b.DB, Dial: func(address string) outputs.Relay {
		c := nodeapi(address)
		return nodev1connect.NewRelayServiceClient(c.HTTP, c.BaseURL, c.Options...)
	}})
	if err := s.mount(gates, tasks, workspaces, findings.NewServer(finder, b.Audit), instances, reader); err != nil {
		return err
	}
	consumer, err := events.NewConsumer(events.ConsumerDeps{
		Pool: b.DB, Numbered: b.Numbered, Wake: b.Wake,
		Logger: b.Logger,
	}, events.ConsumerConfig{
		Name: "sessions", Schema: "lifecycle", Kinds: []string{"session.changed"},
	})
	if err != nil {
		return fmt.Errorf("build consumer of sessions: %w", err)
	}
	woken, err := events.NewConsumer(events.ConsumerDeps{Pool: b.DB, Numbered: b.Numbered, Wake: b.Wake, Logger: b.Logger},
		detect.WokenConsumer())
	if err != nil {
		return fmt.Errorf("build consumer of refused instances: %w", err)
	}
	b.Consumes(consumer.Name(), woken.Name(), detect.ReportsConsumer)
	b.Add(
		app.Task{
			Name: "woken-instances",
			Run:  func(ctx context.Context) error { return woken.Run(ctx, detect.ApplyWoken) },
		},
		app.Task{Name: "woken-sweep", Run: func(ctx context.Context) error {
			pause := func() func(context.Context) bool {
				wake := b.Numbered.C() // an event reports each refusal that it reads
				return func(ctx context.Context) bool { return b.Numbered.Pace(ctx, nil, wake, s.cfg.WokenSweep) }
			}
			return app.EveryPaced(ctx, b.Logger, "woken-sweep", pause, func(ctx context.Context) error {
				_, err := finder.SweepWoken(ctx)
				return err
			})
		}},
		app.Task{Name: "sagas", Phase: app.PhaseLeases, Run: func(ctx context.Context) error {
			guard.Await(ctx, func(ctx context.Context) bool { return app.Sleep(ctx, time.Second) })
			return driver.Run(ctx)
		}},
		app.Task{Name: "work-hints", Run: hub.Run},
		app.Task{Name: "sessions", Run: func(ctx context.Context) error { return consumer.Run(ctx, apply) }},
		app.Task{Name: "task-sweep", Run: func(ctx context.Context) error { return s.sweep(ctx, tasks) }},
		app.Task{
			Name: "wake-elsewhere",
			Run:  func(ctx context.Context) error { return s.core.FollowRemoteWakes(ctx, b.Numbered) },
		},
		app.Task{Name: "background", Run: sweeps.Run},
		app.Task{Name: "seal-stored", Run: func(ctx context.Context) error {
			return s.sealStored(ctx, sealer, tasks)
		}},
		app.Task{Name: "finding-counts", Run: func(ctx context.Context) error {
			return app.Every(ctx, b.Logger, "finding-counts", s.cfg.FindingSweep, finder.Measure)
		}},
	)
	if s.instances != nil {
		b.Add(app.Task{Name: "boxes", Run: s.instances.Keep})
	}
	return nil
}

// sweepTimeout bounds a sweep: the next sweep does what is left.
const sweepTimeout = 5 * time.Minute

// twoTimeout bounds the check for two instances of one workspace: a placement that does not answer delays the next
// check by no more than that.
const twoTimeout = time.Minute

func (s *Service) mount(gates *gate.Server, tasks *dispatch.Server, workspaces *operation.Server, found *findings.Server,
	instances *reap.Instances,
	reader *outputs.Server,
) error {
	opts := s.server.HandlerOptions()
	path, h := lifecyclev1connect.NewGateServiceHandler(gates, opts...)
	err := s.server.Mount(path, h)
	path, h = lifecyclev1connect.NewTaskServiceHandler(tasks, opts...)
	err = errors.Join(err, s.server.Mount(path, h))
	path, h = lifecyclev1connect.NewFindingServiceHandler(found, opts...)
	err = errors.Join(err, s.server.Mount(path, h))
	path, h = lifecyclev1connect.NewInstanceServiceHandler(instances, opts...)
	err = errors.Join(err, s.server.Mount(path, h))
	path, h = lifecyclev1connect.NewOutputServiceHandler(reader, opts...)
	err = errors.Join(err, s.server.Mount(path, h))
	path, h = commonv1connect.NewAnnounceServiceHandler(reannounce.NewServer(s.base.DB, s.core.Committed, announced()...),
		opts...)
	err = errors.Join(err, s.server.Mount(path, h))
	path, h = lifecyclev1connect.NewAllocationServiceHandler(operation.NewAllocations(workspaces), opts...)
	err = errors.Join(err, s.server.Mount(path, h))
	path, h = lifecyclev1connect.NewWorkspaceServiceHandler(workspaces, opts...)
	if err = errors.Join(err, s.server.Mount(path, h)); err != nil {
		return fmt.Errorf("mount services: %w", err)
	}
	return nil
}

// announced returns the live rows of lifecycle, tenants before the rows that belong to them.
func announced() []reannounce.Source {
	return slices.Concat([]reannounce.Source{tenants.Announced()}, allocation.Announced(), workspace.Announced(),
		runs.Announced(), []reannounce.Source{claims.Announced(), gate.Announced(), task.Announced(), finding.Announced()})
}

// apply applies nodeapi's events about sessions.
func apply(ctx context.Context, tx pgx.Tx, r events.Record) error {
	f := &nodev1.SessionChanged{}
	if err := r.Decode(f); err != nil {
		return err
	}
	if err := gate.OnSession(ctx, tx, f); err != nil {
		return err
	}
	return findings.OnSession(ctx, tx, f)
}

// sweep ends stale tasks at the cadence of the policy.
func (s *Service) sweep(ctx context.Context, tasks *dispatch.Server) error {
	for {
		if !app.Sleep(ctx, s.base.Policy.Current().TaskStaleSweepInterval()) {
			return nil
		}
		swept, err := tasks.Sweep(ctx)
		if err != nil && ctx.Err() == nil {
			s.base.Logger.WarnContext(ctx, "stale tasks not swept", obs.Err(err))
		}
		if swept.Expired+swept.Unknown > 0 {
			s.base.Logger.InfoContext(ctx, "stale tasks swept", slog.Int("expired", swept.Expired),
				slog.Int("outcome_unknown", swept.Unknown))
		}
	}
}
