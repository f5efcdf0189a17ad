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
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/common/v1/commonv1connect"
	"github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1/lifecyclev1connect"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/node/v1/nodev1connect"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/background"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/lock"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/reannounce"
	"github.com/gpuaas/mesh/internal/rpc/port"
	"github.com/gpuaas/mesh/internal/secretenv"
	"github.com/gpuaas/mesh/internal/service"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
	"github.com/gpuaas/mesh/services/lifecycle/findings"
	"github.com/gpuaas/mesh/services/lifecycle/findings/detect"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/launchlog"
	"github.com/gpuaas/mesh/services/lifecycle/operation"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/placement/process"
	"github.com/gpuaas/mesh/services/lifecycle/placement/static"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/reap"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/spec"
	"github.com/gpuaas/mesh/services/lifecycle/task"
	"github.com/gpuaas/mesh/services/lifecycle/task/dispatch"
)

// Deps of the service.
type Deps struct {
	Logger   *slog.Logger
	Registry *obs.Registry
	// Numbering is shared by the services of one process; nil: the service has one of its own.
	Numbering *service.Numbering
}

// Service is one replica of lifecycle.
type Service struct {
	base      *service.Base
	cfg       Config
	server    *port.Server
	workloads *pgxpool.Pool
	redis     *redis.Client
	instances *process.Driver
	core      *saga.Core
}

// New builds a replica. It listens, and serves nothing before Run.
func New(ctx context.Context, deps Deps, cfg Config) (*Service, error) {
	base, err := service.New(ctx, deps.Logger, deps.Registry, "lifecycle", cfg.Config,
		service.WithPoolSettings(saga.PoolSettings()), service.WithNumbering(deps.Numbering))
	if err != nil {
		return nil, err
	}
	s := &Service{base: base, cfg: cfg}
	if err := s.build(ctx); err != nil {
		s.close()
		base.Close()
		return nil, fmt.Errorf("build lifecycle: %w", err)
	}
	return s, nil
}

// material has the secrets and keys that the service reads from files.
type material struct {
	signingKeys

	secret []byte
	values *secretenv.Keys
}

func (s *Service) material(ctx context.Context) (material, error) {
	var m material
	if err := m.open(ctx, s.base, s.cfg); err != nil {
		return m, err
	}
	secret, err := s.cfg.SecretFile.Read()
	if err != nil {
		return m, fmt.Errorf("read secret: %w", err)
	}
	if len(secret.Reveal()) < 32 {
		return m, errors.New("read secret: it is shorter than 32 characters")
	}
	m.secret = []byte(secret.Reveal())
	m.values, err = workloadSecrets(s.cfg)
	return m, err
}

func workloadSecrets(cfg Config) (*secretenv.Keys, error) {
	keys, err := secretenv.Load(cfg.WorkloadSecretsKeysFile)
	if err != nil {
		return nil, fmt.Errorf("read workload_secrets_keys_file: %w", err)
	}
	return keys, nil
}

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
	stale, err := provision.NewEpochRefusals(b.Registry.ForService(b.Name), func() *saga.Core { return s.core })
	if err != nil {
		return err
	}
	hub := dispatch.NewHub(b.Logger, b.DB, b.Numbered)
	tasks := dispatch.NewServer(dispatch.Deps{
		Logger: b.Logger, DB: b.DB, Keys: m.tasks, Hub: hub,
		Wake:      func(ctx context.Context, tx pgx.Tx, runIDs []string) error { return s.core.Wake(ctx, tx, runIDs...) },
		Committed: s.committed, Superseded: stale.Tasks, Audit: b.Audit, Secrets: m.values,
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
		Logger: b.Logger, DB: b.DB, Workloads: s.workloads, Core: func() *saga.Core { return s.core }, Tasks: tasks,
		Identities: recoveryv1connect.NewInstanceServiceClient(rc.HTTP, rc.BaseURL, rc.Options...),
		Drivers:    drivers, Catalogue: catalogue, Secret: m.secret, Secrets: m.values,
		ReleaseDeadline: s.cfg.ReleaseDeadline, Policy: b.Policy,
	})
	registry, err := steps.Registry()
	if err != nil {
		return err
	}
	s.core, err = saga.New(saga.Deps{
		DB: b.DB, Registry: registry, Logger: b.Logger, Appended: b.Wake, Stalls: steps.Stalls,
		Resumed: steps.Resumed, Resuming: task.LockOfRuns,
		Withdraw: tasks.Withdraw,
	})
	if err != nil {
		return fmt.Errorf("build saga core: %w", err)
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
		Logger: b.Logger, DB: b.DB, Join: m.join, Tasks: tasks, Instances: provision.Registrations{Core: s.core},
		Committed: s.committed,
		Slots:     s.cfg.Placement.Static.SlotsPerNode,
	})
	reaper, err := reap.NewReaper(reap.ReaperDeps{
		Logger: b.Logger, DB: b.DB, Drivers: drivers, Metrics: b.Registry.ForService(b.Name), Committed: s.committed,
		Identities: recoveryv1connect.NewInstanceServiceClient(rc.HTTP, rc.BaseURL, rc.Options...),
	})
	if err != nil {
		return err
	}
	sealer := &spec.Sealer{DB: b.DB, Secrets: m.values, Committed: s.committed}
	if _, err := checkKeys(ctx, b.Logger, sealer, s.cfg.WorkloadSecretsLostKeys); err != nil {
		return err
	}
	scans, err := b.Pool(ctx, "findings", findings.Conns)
	if err != nil {
		return err
	}
	finder, err := findings.New(findings.Deps{
		Logger: b.Logger, DB: scans, Workloads: s.workloads, Drivers: drivers, Metrics: b.Registry.ForService(b.Name),
		Committed: s.committed,
	}, findings.Config{Grace: s.cfg.FindingGrace})
	if err != nil {
		return err
	}
	shared := reap.NewSharedReaper(reap.SharedReaperDeps{
		Logger: b.Logger, DB: b.DB, Workloads: s.workloads, Committed: s.committed,
		Identities: recoveryv1connect.NewInstanceServiceClient(rc.HTTP, rc.BaseURL, rc.Options...),
	})
	machines := reap.NewMachineReaper(reap.MachineReaperDeps{
		Logger: b.Logger, DB: b.DB, Tasks: tasks,
		Committed: s.committed,
	})
	confirmer := &allocation.ClaimConfirmer{Logger: b.Logger, DB: b.DB, Committed: s.committed}
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
		DB: b.DB, Drivers: drivers, Audit: b.Audit, Committed: s.committed,
		Identities: recoveryv1connect.NewInstanceServiceClient(rc.HTTP, rc.BaseURL, rc.Options...),
	})
	nodeapi, err := b.Peers("nodeapi")
	if err != nil {
		return err
	}
	outputs := operation.NewOutputs(operation.OutputsDeps{DB: b.DB, Dial: func(address string) operation.Relay {
		c := nodeapi(address)
		return nodev1connect.NewRelayServiceClient(c.HTTP, c.BaseURL, c.Options...)
	}})
	if err := s.mount(gates, tasks, workspaces, findings.NewServer(finder, b.Audit), instances, outputs); err != nil {
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

func (s *Service) mount(gates *gate.Server, tasks *dispatch.Server, workspaces *operation.Server,
	found *findings.Server,
	instances *reap.Instances,
	outputs *operation.Outputs,
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
	path, h = lifecyclev1connect.NewOutputServiceHandler(outputs, opts...)
	err = errors.Join(err, s.server.Mount(path, h))
	path, h = commonv1connect.NewAnnounceServiceHandler(reannounce.NewServer(s.base.DB, s.committed, announced()...),
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
	return slices.Concat([]reannounce.Source{operation.AnnouncedTenants()}, allocation.Announced(), saga.Announced(),
		[]reannounce.Source{claims.Announced(), gate.Announced(), task.Announced(), finding.Announced()})
}

// openStores opens the stores that lifecycle uses beside its own database.
func (s *Service) openStores(ctx context.Context) error {
	url, err := s.cfg.WorkloadDatabaseURL.Read()
	if err != nil {
		return fmt.Errorf("read workload database url: %w", err)
	}
	s.workloads, err = pg.Open(ctx,
		pg.Config{URL: url.Reveal(), ApplicationName: "gpuaas-lifecycle-workloads", MaxConns: 4})
	if err != nil {
		return fmt.Errorf("open workload database: %w", err)
	}
	return nil
}

// lockStore returns the lock store that makes joins fast; nil if none is configured.
func (s *Service) lockStore() (*lock.Lock, error) {
	if s.cfg.RedisURLFile == "" {
		return nil, nil
	}
	url, err := s.cfg.RedisURLFile.Read()
	if err != nil {
		return nil, fmt.Errorf("read redis url: %w", err)
	}
	if s.redis, err = lock.Dial(url.Reveal(), lock.Config{}); err != nil {
		return nil, fmt.Errorf("open lock store: %w", err)
	}
	l, err := lock.New(lock.Deps{Client: s.redis, Logger: s.base.Logger, Metrics: s.base.Registry.ForService(s.base.Name)},
		lock.Config{})
	if err != nil {
		return nil, fmt.Errorf("open lock store: %w", err)
	}
	return l, nil
}

func (s *Service) drivers() (map[commonv1.PlacementDriver]placement.Driver, error) {
	out := map[commonv1.PlacementDriver]placement.Driver{commonv1.PlacementDriver_PLACEMENT_DRIVER_STATIC: static.New(s.base.DB)}
	if s.cfg.Placement.Process.Dir == "" {
		return out, nil
	}
	var err error
	if s.instances, err = process.New(s.base.Logger, s.cfg.Placement.Process); err != nil {
		return nil, fmt.Errorf("build process placement: %w", err)
	}
	out[commonv1.PlacementDriver_PLACEMENT_DRIVER_PROCESS] = s.instances
	return out, nil
}

// committed follows every commit that wrote events or woke a run.
func (s *Service) committed() { s.core.Committed() }

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

// Run serves until ctx ends, then stops in order.
func (s *Service) Run(ctx context.Context) error {
	defer s.close()
	return s.base.Run(ctx)
}

func (s *Service) close() {
	if s.workloads != nil {
		s.workloads.Close()
	}
	if s.redis != nil {
		_ = s.redis.Close()
	}
}

// PowerOffInstances stops everything that runs on launched instances without ending them, for a host that goes down.
func (s *Service) PowerOffInstances(ctx context.Context) error {
	if s.instances == nil {
		return nil
	}
	return s.instances.PowerOff(ctx)
}

// Addr returns the address at which other services call.
func (s *Service) Addr() string { return s.server.Addr().String() }

// OpsAddr returns the address at which metrics and health are served.
func (s *Service) OpsAddr() string { return s.base.OpsAddr() }
