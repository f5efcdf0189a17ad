package readmodel

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"connectrpc.com/connect"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/common/v1/commonv1connect"
	"github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1/lifecyclev1connect"
	"github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1/readmodelv1connect"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/background"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/rpc/port"
	"github.com/gpuaas/mesh/internal/service"
	"github.com/gpuaas/mesh/services/readmodel/gateway"
	"github.com/gpuaas/mesh/services/readmodel/gateway/caller"
	"github.com/gpuaas/mesh/services/readmodel/gateway/forward"
	"github.com/gpuaas/mesh/services/readmodel/gateway/meshstatus"
	"github.com/gpuaas/mesh/services/readmodel/gateway/people"
	"github.com/gpuaas/mesh/services/readmodel/notify"
	"github.com/gpuaas/mesh/services/readmodel/project"
	"github.com/gpuaas/mesh/services/readmodel/view"
	"github.com/gpuaas/mesh/services/readmodel/watch"
)

// Deps of the service.
type Deps struct {
	Logger   *slog.Logger
	Registry *obs.Registry
	// Numbering is shared by the services of one process; nil: the service creates its own.
	Numbering *service.Numbering
}

// Service is one replica of readmodel.
type Service struct {
	base      *service.Base
	cfg       Config
	people    *port.Server
	sessions  *people.Sessions
	refusals  *gateway.Refusals
	projector *project.Projector
}

// PoolSettings returns the session settings of the service's own pool. Its statements join many tables and have plans
// that suit all arguments; planning them anew for each call costs several times what running them does.
func PoolSettings() map[string]string {
	return map[string]string{"plan_cache_mode": "force_generic_plan"}
}

// New returns a replica. It listens, and serves nothing before Run.
func New(ctx context.Context, deps Deps, cfg Config) (*Service, error) {
	if err := errors.Join(cfg.Config.Validate(), cfg.Validate()); err != nil {
		return nil, fmt.Errorf("readmodel's configuration: %w", err)
	}
	base, err := service.New(ctx, deps.Logger, deps.Registry, "readmodel", cfg.Config,
		service.WithPoolSettings(PoolSettings()), service.WithNumbering(deps.Numbering))
	if err != nil {
		return nil, err
	}
	s := &Service{base: base, cfg: cfg}
	if err := s.build(ctx); err != nil {
		if s.people != nil {
			err = errors.Join(err, s.people.Close())
		}
		base.Close()
		return nil, fmt.Errorf("build readmodel: %w", err)
	}
	return s, nil
}

func (s *Service) build(ctx context.Context) error {
	b := s.base
	if err := s.checkHosts(); err != nil {
		return err
	}
	metrics := b.Registry.ForService(b.Name)
	var err error
	s.projector, err = project.New(project.Deps{
		Logger: b.Logger, DB: b.DB, Numbered: b.Numbered, Wake: b.Wake,
		Registerer: metrics,
	})
	if err != nil {
		return err
	}
	audit, err := project.NewAudit(project.Deps{Logger: b.Logger, DB: b.DB, Numbered: b.Numbered, Wake: b.Wake})
	if err != nil {
		return err
	}
	b.Consumes(project.ConsumerName, project.AuditConsumerName)
	reader := view.NewReader(b.DB)
	hub, err := watch.New(watch.Deps{
		Logger: b.Logger, DB: b.DB, Reader: reader, Advanced: s.projector.Advanced, Registerer: metrics,
	}, watch.Config{Limits: s.cfg.watchLimits()})
	if err != nil {
		return err
	}
	clients, err := s.owners(ctx, audit)
	if err != nil {
		return err
	}
	notifier, err := notify.New(notify.Deps{
		Logger: b.Logger, DB: b.DB, Reader: reader, Queued: s.projector.Queued, Registerer: metrics,
		Window: func() time.Duration { return b.Policy.Current().AuditDedupeWindow() },
	})
	if err != nil {
		return err
	}
	s.sessions = people.NewSessions(b.DB)
	s.refusals = gateway.NewRefusals(b.Audit, reader)
	reads := caller.Reads{Reader: reader, Projector: s.projector}
	err = s.listen(ctx, clients, gateway.Deps{
		Sessions: s.sessions, Reads: reads, Audit: audit, Hub: hub, Owners: clients.owners,
		Status: meshstatus.NewReporter(meshstatus.Deps{
			Logger: b.Logger, Reads: reads, Probes: clients.probes, DB: b.DB, Room: b.Room,
		}),
	})
	if err != nil {
		return err
	}
	walk, err := b.Retention(ctx, cuts...)
	if err != nil {
		return err
	}
	sweeps, err := background.New(background.Deps{Pool: b.DB, Logger: b.Logger, Registerer: metrics},
		background.Job{Name: "audit-checkpoint", Every: walk.Every, Timeout: time.Minute, Run: audit.Checkpoint},
		background.Job{Name: "dead-rebuilds", Every: time.Hour, Timeout: time.Minute, Run: s.projector.DropDeadRebuilds},
		walk)
	if err != nil {
		return err
	}
	// Only a restore can undo a migration, so this is checked seldom.
	b.Health.Ready("migrations", service.Seldom(time.Minute,
		func(ctx context.Context) error { return pg.CheckMigrated(ctx, b.DB) }))
	b.Add(
		app.Task{Name: "people", Phase: app.PhaseDrain, Run: s.people.Run},
		app.Task{Name: "projections", Run: s.projector.Run},
		app.Task{Name: "audit-log", Run: audit.Run},
		app.Task{Name: "projection-lag", Run: s.projector.Measure},
		app.Task{Name: "watches", Run: hub.Run},
		app.Task{Name: "notifications", Run: notifier.Run},
		app.Task{Name: "background", Run: sweeps.Run},
		app.Task{Name: "person-sessions", Run: func(ctx context.Context) error {
			return app.Every(ctx, b.Logger, "person-sessions", time.Hour, s.sessions.Sweep)
		}},
	)
	return nil
}

// checkHosts returns an error if the certificate is not valid for a host of people_hosts, because people's clients
// would refuse it.
func (s *Service) checkHosts() error {
	leaf := s.base.Store.Certificate().Leaf
	var errs []error
	for _, host := range s.cfg.PeopleHosts {
		if err := leaf.VerifyHostname(host); err != nil {
			errs = append(errs, fmt.Errorf("people_hosts: the service certificate is not good for %s: %w", host, err))
		}
	}
	return errors.Join(errs...)
}

// clients are the clients of the services that own the state.
type clients struct {
	owners     forward.Owners
	probes     []meshstatus.Probe
	announcers []project.Owner
}

// owners returns the clients of the services that own the state.
func (s *Service) owners(ctx context.Context, audit *project.Audit) (clients, error) {
	b := s.base
	asserter, err := s.asserter(ctx, audit)
	if err != nil {
		return clients{}, err
	}
	rc, err := b.Peer("recovery", s.cfg.Peers.Recovery, asserter)
	if err != nil {
		return clients{}, err
	}
	lc, err := b.Peer("lifecycle", s.cfg.Peers.Lifecycle, asserter)
	if err != nil {
		return clients{}, err
	}
	probe := func(name string, c service.Client, parts ...string) meshstatus.Probe {
		health := commonv1connect.NewHealthServiceClient(c.HTTP, c.BaseURL, c.Options...)
		return meshstatus.Probe{
			Name: name, Parts: parts,
			Ask: func(ctx context.Context) (*commonv1.GetHealthResponse, error) {
				return health.GetHealth(ctx, &commonv1.GetHealthRequest{})
			},
		}
	}
	announcer := func(c service.Client) project.Owner {
		return commonv1connect.NewAnnounceServiceClient(c.HTTP, c.BaseURL, c.Options...)
	}
	return clients{
		announcers: []project.Owner{announcer(lc), announcer(rc)},
		owners: forward.Owners{
			Workspaces:  lifecyclev1connect.NewWorkspaceServiceClient(lc.HTTP, lc.BaseURL, lc.Options...),
			Findings:    lifecyclev1connect.NewFindingServiceClient(lc.HTTP, lc.BaseURL, lc.Options...),
			Allocations: lifecyclev1connect.NewAllocationServiceClient(lc.HTTP, lc.BaseURL, lc.Options...),
			Instances:   lifecyclev1connect.NewInstanceServiceClient(lc.HTTP, lc.BaseURL, lc.Options...),
			Outputs:     lifecyclev1connect.NewOutputServiceClient(lc.HTTP, lc.BaseURL, lc.Options...),
			Tasks:       lifecyclev1connect.NewTaskServiceClient(lc.HTTP, lc.BaseURL, lc.Options...),
			Gates:       lifecyclev1connect.NewGateServiceClient(lc.HTTP, lc.BaseURL, lc.Options...),
			Identities:  recoveryv1connect.NewIdentityServiceClient(rc.HTTP, rc.BaseURL, rc.Options...),
			Policies:    recoveryv1connect.NewPolicyServiceClient(rc.HTTP, rc.BaseURL, rc.Options...),
			Watchdog:    recoveryv1connect.NewWatchdogServiceClient(rc.HTTP, rc.BaseURL, rc.Options...),
			Rollback:    recoveryv1connect.NewRollbackServiceClient(rc.HTTP, rc.BaseURL, rc.Options...),
			HostFacts:   recoveryv1connect.NewHostFactsServiceClient(rc.HTTP, rc.BaseURL, rc.Options...),
			Keys:        recoveryv1connect.NewKeyServiceClient(rc.HTTP, rc.BaseURL, rc.Options...),
			Tokens:      recoveryv1connect.NewTokenServiceClient(rc.HTTP, rc.BaseURL, rc.Options...),
			Actions:     recoveryv1connect.NewActionServiceClient(rc.HTTP, rc.BaseURL, rc.Options...),
			Health:      recoveryv1connect.NewHealthServiceClient(rc.HTTP, rc.BaseURL, rc.Options...),
			Diagnostics: recoveryv1connect.NewDiagnosticsServiceClient(rc.HTTP, rc.BaseURL, rc.Options...),
			Collected:   lifecyclev1connect.NewDiagnosticsServiceClient(lc.HTTP, lc.BaseURL, lc.Options...),
			Trust:       recoveryv1connect.NewTrustServiceClient(rc.HTTP, rc.BaseURL, rc.Options...),
			Profiles:    recoveryv1connect.NewProfileServiceClient(rc.HTTP, rc.BaseURL, rc.Options...),
			Bundles:     recoveryv1connect.NewBundleServiceClient(rc.HTTP, rc.BaseURL, rc.Options...),
			Authority:   recoveryv1connect.NewAuthorityServiceClient(rc.HTTP, rc.BaseURL, rc.Options...),
		},
		probes: []meshstatus.Probe{
			probe("lifecycle", lc, "lock_store", service.PartDatabaseRoom),
			probe("recovery", rc, "ca", "ingress_trust", service.PartDatabaseRoom),
		},
	}, nil
}

// listen opens the people's port.
func (s *Service) listen(ctx context.Context, c clients, deps gateway.Deps) error {
	b := s.base
	edge, err := gateway.Edge(s.cfg.TrustedOrigins)
	if err != nil {
		return err
	}
	s.people, err = port.New(ctx, port.Deps{
		Logger: b.Logger, Registerer: b.Registry.ForService(b.Name), Authenticate: s.sessions.Authenticate,
		OnDenied: s.refusals.Denied, Wrap: edge, Translate: pg.Fault,
	}, port.Config{
		Name: "people", Addr: s.cfg.PeopleListen,
		TLS: pki.ServerConfig{Store: b.Store, TrustDomain: b.Config.TrustDomain}, // people have no certificates
	})
	if err != nil {
		return fmt.Errorf("open people's port: %w", err)
	}
	if err := s.people.MountHealth(func(ctx context.Context) bool { return b.Health.ReadyReport(ctx).OK() }); err != nil {
		return err
	}
	if s.cfg.Reflection {
		if err := s.people.MountReflection(); err != nil {
			return err
		}
	}
	reads, opts, mount := deps.Reads, s.options(), s.people.Mount
	return errors.Join(
		mount(readmodelv1connect.NewFindingServiceHandler(forward.NewFindings(reads, c.owners), opts...)),
		mount(readmodelv1connect.NewIncidentServiceHandler(forward.NewIncidents(reads, c.owners), opts...)),
		mount(readmodelv1connect.NewNotificationServiceHandler(
			gateway.NewNotifications(reads, b.DB, b.Logger), opts...)),
		mount(readmodelv1connect.NewHostFactsServiceHandler(
			forward.NewHostFacts(forward.NewCommand(reads, c.owners)), opts...)),
		mount(readmodelv1connect.NewRollbackServiceHandler(forward.NewRollbacks(c.owners), opts...)),
		mount(readmodelv1connect.NewKeyServiceHandler(forward.NewKeys(c.owners), opts...)),
		mount(readmodelv1connect.NewTokenServiceHandler(forward.NewTokens(c.owners), opts...)),
		mount(readmodelv1connect.NewActionServiceHandler(forward.NewRecoveryActions(c.owners), opts...)),
		mount(readmodelv1connect.NewDiagnosticsServiceHandler(forward.NewDiagnostics(reads, c.owners), opts...)),
		mount(readmodelv1connect.NewTrustServiceHandler(forward.NewTrust(c.owners), opts...)),
		mount(readmodelv1connect.NewProfileServiceHandler(forward.NewProfiles(c.owners), opts...)),
		mount(readmodelv1connect.NewBundleServiceHandler(forward.NewBundles(c.owners), opts...)),
		mount(readmodelv1connect.NewAuthorityServiceHandler(forward.NewAuthority(c.owners), opts...)),
		mount(readmodelv1connect.NewRetentionServiceHandler(meshstatus.NewRetention(b.DB, b.Policy), opts...)),
		mount(readmodelv1connect.NewProjectionServiceHandler(meshstatus.NewProjections(meshstatus.ProjectionsDeps{
			Projector: s.projector, Announcers: c.announcers, DB: b.DB, Wake: b.Wake,
		}), opts...)),
		mount(readmodelv1connect.NewEventServiceHandler(meshstatus.NewEvents(b.DB, b.DB, b.Wake), opts...)),
		mount(readmodelv1connect.NewReleaseServiceHandler(forward.NewReleases(reads, c.owners), opts...)),
		mount(readmodelv1connect.NewInstanceServiceHandler(forward.NewInstances(c.owners), opts...)),
		mount(readmodelv1connect.NewQueryServiceHandler(gateway.NewQuery(deps), opts...)),
		mount(readmodelv1connect.NewAuditServiceHandler(gateway.NewAudit(deps), opts...)),
		mount(readmodelv1connect.NewPeopleServiceHandler(people.NewServer(people.Deps{
			DB: b.DB, Audit: b.Audit, Wake: b.Wake, Sessions: s.sessions, Reads: reads,
		}), opts...)),
		mount(readmodelv1connect.NewEscalationServiceHandler(s.escalation(c, deps), opts...)),
		mount(readmodelv1connect.NewCommandServiceHandler(forward.NewCommand(reads, c.owners), opts...)),
	)
}

func (s *Service) options() []connect.HandlerOption {
	// runs inside the guard, so it knows the person
	return append(s.people.HandlerOptions(), connect.WithInterceptors(s.refusals))
}

// Run serves until ctx ends, then ends the streams and stops in order.
func (s *Service) Run(ctx context.Context) error { return s.base.Run(ctx) }

// OpsAddr returns the address at which metrics and health are served.
func (s *Service) OpsAddr() string { return s.base.OpsAddr() }

// ReplicaID returns the id of this replica.
func (s *Service) ReplicaID() string { return s.base.ReplicaID }

// Services returns the names of the services that people can call.
func (s *Service) Services() []string { return s.people.Services() }

// Verify compares the projection with a fresh one made from event 0 on.
func (s *Service) Verify(ctx context.Context) (project.Report, error) {
	return s.projector.Verify(ctx)
}

// Sessions returns the sessions of people.
func (s *Service) Sessions() *people.Sessions { return s.sessions }

// Admission describes a person to be created.
type Admission = people.Admission

// AdmitPerson creates a person, or a further session of an existing person, without the API, and returns the token,
// which is stored nowhere. db logs in as readmodel.
func AdmitPerson(ctx context.Context, db pg.Beginner, a Admission) (string, error) {
	return people.Admit(ctx, db, a)
}
