package lifecycle

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/node/v1/nodev1connect"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/background"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/lock"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/service"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/findings"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/launchlog"
	"github.com/gpuaas/mesh/services/lifecycle/operation"
	"github.com/gpuaas/mesh/services/lifecycle/outputs"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/reap"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/drive"
	"github.com/gpuaas/mesh/services/lifecycle/spec"
	"github.com/gpuaas/mesh/services/lifecycle/task"
	"github.com/gpuaas/mesh/services/lifecycle/task/dispatch"
)

// parts makes the parts of the service, from what several of them share.
type parts struct {
	*service.Base
	material

	cfg       Config
	metrics   prometheus.Registerer
	workloads *pgxpool.Pool
	lock      *lock.Lock // makes joins fast; nil if no lock store is configured
	drivers   map[commonv1.PlacementDriver]placement.Driver
	catalogue spec.Catalogue
	recovery  service.Client
	// identities are recovery's, of launched instances.
	identities recoveryv1connect.InstanceServiceClient
	wakes      *saga.Wakes
}

// openParts reads the keys and opens the stores, the placements and the connection to recovery.
func (s *Service) openParts(ctx context.Context) (*parts, error) {
	b := s.base
	p := &parts{Base: b, cfg: s.cfg, metrics: b.Registry.ForService(b.Name), wakes: saga.NewWakes(b.Wake)}
	var err error
	if p.material, err = s.material(ctx); err != nil {
		return nil, err
	}
	if err := s.openStores(ctx); err != nil {
		return nil, err
	}
	p.workloads = s.workloads
	if p.lock, err = s.lockStore(); err != nil {
		return nil, err
	}
	b.Health.Watch("lock_store", p.lock.Check)
	if p.recovery, err = b.Peer("recovery", s.cfg.Peers.Recovery, nil); err != nil {
		return nil, err
	}
	p.identities = recoveryv1connect.NewInstanceServiceClient(p.recovery.HTTP, p.recovery.BaseURL, p.recovery.Options...)
	if p.drivers, err = s.drivers(); err != nil {
		return nil, err
	}
	placementDefault, err := names.Parse[commonv1.PlacementDriver](s.cfg.DefaultPlacement)
	if err != nil {
		return nil, fmt.Errorf("default placement: %w", err)
	}
	p.catalogue = spec.Catalogue{
		Plans: s.cfg.Plans, Regions: s.cfg.Regions, Default: placementDefault,
		Placements: slices.Collect(maps.Keys(p.drivers)),
	}
	return p, nil
}

func (p *parts) tasks(hub *dispatch.Hub, refusals *provision.EpochRefusals) *dispatch.Server {
	return dispatch.NewServer(dispatch.Deps{
		Logger: p.Logger, DB: p.DB, Keys: p.signingKeys.tasks, Hub: hub, Wake: p.wakes.Wake, Committed: p.wakes.Committed,
		Superseded: refusals.Tasks, Audit: p.Audit, Secrets: p.values,
	})
}

func (p *parts) launchLog() *launchlog.Guard {
	return launchlog.New(launchlog.Deps{
		Logger: p.Logger, DB: p.DB, Drivers: p.drivers,
		Recovery: recoveryv1connect.NewRollbackServiceClient(p.recovery.HTTP, p.recovery.BaseURL, p.recovery.Options...),
	})
}

func (p *parts) steps(tasks *dispatch.Server, launches *launchlog.Guard,
	refusals *provision.EpochRefusals,
) *provision.Steps {
	return provision.NewSteps(provision.StepDeps{
		EpochRefusals: refusals, LaunchLog: launches, Logger: p.Logger, DB: p.DB, Workloads: p.workloads,
		Committed: p.wakes.Committed, Tasks: tasks, Identities: p.identities, Drivers: p.drivers, Catalogue: p.catalogue,
		Secret: p.secret, Secrets: p.values, ReleaseDeadline: p.cfg.ReleaseDeadline, Policy: p.Policy,
	})
}

func (p *parts) core(steps *provision.Steps, tasks *dispatch.Server) (*saga.Core, error) {
	registry, err := steps.Registry()
	if err != nil {
		return nil, err
	}
	core, err := saga.New(saga.Deps{
		DB: p.DB, Registry: registry, Logger: p.Logger, Wakes: p.wakes, Stalls: steps.Stalls,
		PostponeDeadlines: steps.PostponeDeadlines, LockDeadlines: task.LockOfRuns,
		Withdraw: tasks.Withdraw,
	})
	if err != nil {
		return nil, fmt.Errorf("build saga core: %w", err)
	}
	if err := p.metrics.Register(core.FencedWrites()); err != nil {
		return nil, fmt.Errorf("register metric of fenced writes: %w", err)
	}
	return core, nil
}

func (p *parts) driver(core *saga.Core) (*drive.Driver, error) {
	driver, err := drive.New(core, driverConfig(p.Policy, p.cfg, p.ReplicaID))
	if err != nil {
		return nil, fmt.Errorf("build saga driver: %w", err)
	}
	return driver, nil
}

// driverConfig returns the configuration of a replica's driver, which reads the policy whenever it is needed.
func driverConfig(reader policy.Reader, cfg Config, replica string) drive.Config {
	out := drive.Default()
	out.Owner, out.Workers = replica, cfg.Workers
	out.GraceNow = func() time.Duration { return reader.Current().SagaCancelGrace() }
	out.Lease, out.Heartbeat = cfg.SagaLease, cfg.SagaLease/3
	return out
}

// sealer returns an error if a key that rows need is missing.
func (p *parts) sealer(ctx context.Context) (*spec.Sealer, error) {
	sealer := &spec.Sealer{DB: p.DB, Secrets: p.values, Committed: p.wakes.Committed}
	_, err := checkKeys(ctx, p.Logger, sealer, p.cfg.WorkloadSecretsLostKeys)
	return sealer, err
}

// finder has connections of its own: its scans take long.
func (p *parts) finder(ctx context.Context) (*findings.Sweeper, error) {
	scans, err := p.Pool(ctx, "findings", findings.Conns)
	if err != nil {
		return nil, err
	}
	return findings.New(findings.Deps{
		Logger: p.Logger, DB: scans, Workloads: p.workloads, Drivers: p.drivers, Metrics: p.metrics,
		Committed: p.wakes.Committed,
	}, findings.Config{Grace: p.cfg.FindingGrace})
}

func (p *parts) consumer(cfg events.ConsumerConfig) (*events.Consumer, error) {
	return p.batches(cfg, nil)
}

// batches returns a consumer that applies whole batches with together, if that is not nil.
func (p *parts) batches(cfg events.ConsumerConfig, together func(context.Context, pgx.Tx, []events.Record) error,
) (*events.Consumer, error) {
	consumer, err := events.NewConsumer(events.ConsumerDeps{
		Pool: p.DB, Numbered: p.Numbered, Wake: p.Wake,
		Logger: p.Logger, Together: together,
	}, cfg)
	if err != nil {
		return nil, fmt.Errorf("build consumer %s: %w", cfg.Name, err)
	}
	return consumer, nil
}

func (p *parts) gates(tasks *dispatch.Server) *gate.Server {
	return gate.NewServer(gate.Deps{
		Logger: p.Logger, DB: p.DB, Join: p.join, Tasks: tasks, Instances: allocation.Registrations{Wakes: p.wakes},
		Committed: p.wakes.Committed,
		Slots:     p.cfg.Placement.Static.SlotsPerNode,
	})
}

func (p *parts) workspaces(core *saga.Core) *operation.Server {
	return operation.NewServer(operation.Deps{
		Logger: p.Logger, DB: p.DB, Core: core, Catalogue: p.catalogue, Lock: p.lock, Policy: p.Policy, Audit: p.Audit,
		DefaultQuota: p.cfg.DefaultQuota,
		Secrets:      p.values,
	})
}

func (p *parts) instances() *reap.Instances {
	return reap.NewInstances(reap.InstancesDeps{
		DB: p.DB, Drivers: p.drivers, Audit: p.Audit, Committed: p.wakes.Committed, Identities: p.identities,
	})
}

func (p *parts) outputs() (*outputs.Server, error) {
	nodeapi, err := p.Peers("nodeapi")
	if err != nil {
		return nil, err
	}
	return outputs.NewServer(outputs.Deps{DB: p.DB, Dial: func(address string) outputs.Relay {
		c := nodeapi(address)
		return nodev1connect.NewRelayServiceClient(c.HTTP, c.BaseURL, c.Options...)
	}}), nil
}

// sweepTimeout bounds a sweep: the next sweep does what is left.
const sweepTimeout = 5 * time.Minute

// twoTimeout bounds the check for two instances of one workspace: a placement that does not answer delays the next
// check by no more than that.
const twoTimeout = time.Minute

// sweeps are the periodic jobs on what belongs to no workspace, on claims, on rows past their retention and on
// findings.
func (p *parts) sweeps(ctx context.Context, tasks *dispatch.Server, launches *launchlog.Guard,
	finder *findings.Sweeper,
) (*background.Runner, error) {
	reaper, err := reap.NewReaper(reap.ReaperDeps{
		Logger: p.Logger, DB: p.DB, Drivers: p.drivers, Metrics: p.metrics, Committed: p.wakes.Committed,
		Identities: p.identities,
	})
	if err != nil {
		return nil, err
	}
	machines := reap.NewMachineReaper(reap.MachineReaperDeps{
		Logger: p.Logger, DB: p.DB, Tasks: tasks,
		Committed: p.wakes.Committed,
	})
	shared := reap.NewSharedReaper(reap.SharedReaperDeps{
		Logger: p.Logger, DB: p.DB, Workloads: p.workloads, Committed: p.wakes.Committed, Identities: p.identities,
	})
	confirmer := &allocation.ClaimConfirmer{Logger: p.Logger, DB: p.DB, Committed: p.wakes.Committed}
	retention, err := p.Retention(ctx, cuts...)
	if err != nil {
		return nil, err
	}
	orphans := func(ctx context.Context) error {
		// Differences between the log and the database are reported to recovery before anything is ended.
		if err := launches.Check(ctx); err != nil {
			return err
		}
		_, err := reaper.Sweep(ctx)
		return err
	}
	orphanEvery, findEvery := p.cfg.OrphanSweep, p.cfg.FindingSweep
	return background.New(background.Deps{Pool: p.DB, Logger: p.Logger, Registerer: p.metrics},
		background.Job{Name: "orphans", Every: orphanEvery, Timeout: sweepTimeout, Run: orphans},
		background.Job{Name: "machine_orphans", Every: orphanEvery, Timeout: sweepTimeout, Run: uncounted(machines.Sweep)},
		background.Job{Name: "shared_orphans", Every: orphanEvery, Timeout: sweepTimeout, Run: uncounted(shared.Sweep)},
		background.Job{Name: "claims", Every: orphanEvery, Timeout: sweepTimeout, Run: uncounted(confirmer.Sweep)},
		retention,
		background.Job{Name: "findings", Every: findEvery, Timeout: sweepTimeout, Run: uncounted(finder.Sweep)},
		background.Job{
			Name: "two_instances", Every: findEvery, Timeout: twoTimeout,
			Run: uncounted(finder.SweepTwoInstances),
		})
}

// uncounted returns a sweep without its counts, which it logs and measures itself.
func uncounted[Counts any](sweep func(context.Context) (Counts, error)) func(context.Context) error {
	return func(ctx context.Context) error {
		_, err := sweep(ctx)
		return err
	}
}
