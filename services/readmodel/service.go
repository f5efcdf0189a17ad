package readmodel

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/rpc/port"
	"github.com/gpuaas/mesh/internal/service"
	"github.com/gpuaas/mesh/services/readmodel/auditlog"
	"github.com/gpuaas/mesh/services/readmodel/gateway"
	"github.com/gpuaas/mesh/services/readmodel/gateway/people"
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
	audit     *auditlog.Log
	reader    *view.Reader
	hub       *watch.Hub
	clients   clients
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
	s := &Service{base: base, cfg: cfg, reader: view.NewReader(base.DB), sessions: people.NewSessions(base.DB)}
	for _, part := range s.parts() {
		if err := part(ctx); err != nil {
			if s.people != nil {
				err = errors.Join(err, s.people.Close())
			}
			base.Close()
			return nil, fmt.Errorf("build readmodel: %w", err)
		}
	}
	return s, nil
}

// parts returns what builds the service, in order: each part uses those above it.
func (s *Service) parts() []func(context.Context) error {
	return []func(context.Context) error{
		s.checkHosts,       // is the certificate good for people's clients
		s.addProjector,     // the tables that people read, made of events
		s.addAudit,         // the audit log, a chain of its own
		s.addWatches,       // streams of what changes
		s.openOwners,       // clients of the services that own the state
		s.addNotifications, // what people are told unasked
		s.openPeople,       // the port that people call
		s.mount,            // what it offers
		s.addBackground,    // periodic work, and the retention of rows
	}
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
func AdmitPerson(ctx context.Context, db *pgxpool.Pool, a Admission) (string, error) {
	return people.Admit(ctx, db, a)
}
