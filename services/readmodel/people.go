package readmodel

import (
	"context"
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect"

	"github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1/readmodelv1connect"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/rpc/port"
	"github.com/gpuaas/mesh/services/readmodel/gateway"
	"github.com/gpuaas/mesh/services/readmodel/gateway/caller"
	"github.com/gpuaas/mesh/services/readmodel/gateway/forward"
	"github.com/gpuaas/mesh/services/readmodel/gateway/meshstatus"
	"github.com/gpuaas/mesh/services/readmodel/gateway/people"
)

// openPeople opens the people's port.
func (s *Service) openPeople(ctx context.Context) error {
	b := s.base
	s.refusals = gateway.NewRefusals(b.Audit, s.reader)
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
	b.Add(
		app.Task{Name: "people", Phase: app.PhaseDrain, Run: s.people.Run},
		app.Task{Name: "person-sessions", Run: func(ctx context.Context) error {
			return app.Every(ctx, b.Logger, "person-sessions", time.Hour, s.sessions.Sweep)
		}},
	)
	if s.cfg.Reflection {
		return s.people.MountReflection()
	}
	return nil
}

// mount mounts what people can call.
func (s *Service) mount(context.Context) error {
	b, c := s.base, s.clients
	reads := caller.Reads{Reader: s.reader, Projector: s.projector}
	deps := gateway.Deps{
		Sessions: s.sessions, Reads: reads, Audit: s.audit, Hub: s.hub, Owners: c.owners,
		Status: meshstatus.NewReporter(meshstatus.Deps{
			Logger: b.Logger, Reads: reads, Probes: c.probes, DB: b.DB, Room: b.Room,
		}),
	}
	opts, mount := s.options(), s.people.Mount
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
		mount(readmodelv1connect.NewEscalationServiceHandler(s.escalation(deps), opts...)),
		mount(readmodelv1connect.NewCommandServiceHandler(forward.NewCommand(reads, c.owners), opts...)),
	)
}

func (s *Service) options() []connect.HandlerOption {
	// runs inside the guard, so it knows the person
	return append(s.people.HandlerOptions(), connect.WithInterceptors(s.refusals))
}
