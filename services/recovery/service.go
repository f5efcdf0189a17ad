package recovery

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/rpc/port"
	"github.com/gpuaas/mesh/internal/service"
	"github.com/gpuaas/mesh/services/recovery/castore"
	"github.com/gpuaas/mesh/services/recovery/enrol"
	"github.com/gpuaas/mesh/services/recovery/identity"
	"github.com/gpuaas/mesh/services/recovery/profiles"
)

// Deps of the service.
type Deps struct {
	Logger   *slog.Logger
	Registry *obs.Registry
	// Numbering is shared by the services of one process; nil: the service makes its own.
	Numbering *service.Numbering
	// Signer replaces the authority that the configuration names, for example by a test's. The caller closes it.
	Signer ca.Signer
}

// Service is one replica of recovery.
type Service struct {
	base       *service.Base
	cfg        Config
	internal   *port.Server
	enroll     *port.Server // nil if this replica serves no enrolment
	signer     ca.Signer
	owned      bool           // the service must close the signer
	castore    *castore.Store // nil if the authority has no database of its own
	witness    *ca.Witness    // of what the signer signs
	keys       signingKeys
	lifecycle  service.Client
	profiles   *profiles.Book
	identities *identity.Identities
	enroller   *enrol.Enroller

	changed, notices events.Signal // wake the loops of this process after its own commits
}

// New builds a replica. It listens, and serves nothing before Run.
func New(ctx context.Context, deps Deps, cfg Config) (*Service, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("configure recovery: %w", err)
	}
	base, err := service.New(ctx, deps.Logger, deps.Registry, "recovery", cfg.Config,
		service.WithNumbering(deps.Numbering))
	if err != nil {
		return nil, err
	}
	s := &Service{base: base, cfg: cfg, signer: deps.Signer}
	for _, part := range s.parts() {
		if err := part(ctx); err != nil {
			s.Close()
			return nil, fmt.Errorf("build recovery: %w", err)
		}
	}
	return s, nil
}

// parts returns what builds the service, in order: each part uses those above it, and mounts its own verbs.
func (s *Service) parts() []func(context.Context) error {
	return []func(context.Context) error{
		s.openAuthority,  // signs the certificates of nodes: embedded, or a process of its own
		s.openKeys,       // of join states and recovery tokens, and those that verify tasks and persons
		s.openLifecycle,  // client of lifecycle
		s.openProfiles,   // where agents connect, and whom they trust
		s.openPort,       // the internal port, which services call
		s.addIdentities,  // states of nodes, and the verbs that change them
		s.addFences,      // tells lifecycle what may be given work
		s.addEnroller,    // certificates for nodes, and bundles to install them
		s.addInstances,   // nodes that lifecycle launches
		s.addAuthority,   // the view of who may hold a session, and the sessions' reports
		s.addPolicy,      // keys of the policy
		s.addWatchdog,    // workspaces that are to be recreated, and decisions about the fleet
		s.addDrift,       // what is wrong with nodes
		s.addTrust,       // does the ingress trust the authority
		s.addTokens,      // recovery tokens
		s.addKeys,        // rotation of keys
		s.addRollback,    // rollback mode
		s.addBackground,  // periodic work, and the retention of rows
		s.serveAnnounced, // rows that are announced again, to rebuild a projection
		s.serveEnrolment, // the port at which machines enrol
	}
}

// Run serves until ctx ends, then drains and stops in order.
func (s *Service) Run(ctx context.Context) error {
	defer s.closeAuthority()
	return s.base.Run(ctx)
}

// Close releases the resources that New opened. It is for a service whose Run is never called.
func (s *Service) Close() {
	for _, server := range []*port.Server{s.internal, s.enroll} {
		if server != nil {
			_ = server.Close() // it never served
		}
	}
	s.closeAuthority()
	s.base.Close()
}

// OpsAddr returns the address at which metrics and health are served.
func (s *Service) OpsAddr() string { return s.base.OpsAddr() }

// ReplicaID returns the id of this replica.
func (s *Service) ReplicaID() string { return s.base.ReplicaID }
