package recovery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/gpuaas/mesh/gen/gpuaas/common/v1/commonv1connect"
	"github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1/lifecyclev1connect"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/background"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/reannounce"
	"github.com/gpuaas/mesh/internal/rpc/port"
	"github.com/gpuaas/mesh/internal/service"
	"github.com/gpuaas/mesh/services/recovery/authority"
	"github.com/gpuaas/mesh/services/recovery/castore"
	"github.com/gpuaas/mesh/services/recovery/drift/judge"
	"github.com/gpuaas/mesh/services/recovery/enrol"
	"github.com/gpuaas/mesh/services/recovery/fences"
	"github.com/gpuaas/mesh/services/recovery/fleet"
	"github.com/gpuaas/mesh/services/recovery/identity"
	"github.com/gpuaas/mesh/services/recovery/instance"
	"github.com/gpuaas/mesh/services/recovery/policyadmin"
	"github.com/gpuaas/mesh/services/recovery/profiles"
	"github.com/gpuaas/mesh/services/recovery/rollback"
	"github.com/gpuaas/mesh/services/recovery/storage"
	"github.com/gpuaas/mesh/services/recovery/trust"
	"github.com/gpuaas/mesh/services/recovery/watchdog"
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
	base     *service.Base
	cfg      Config
	internal *port.Server
	enroll   *port.Server // nil if this replica serves no enrolment
	signer   ca.Signer
	owned    bool           // the service must close the signer
	castore  *castore.Store // nil if the authority has no database of its own
	keys     signingKeys
	profiles *profiles.Book
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
	if err := s.build(ctx); err != nil {
		s.Close()
		return nil, fmt.Errorf("build recovery: %w", err)
	}
	return s, nil
}

// signals wake the loops of this process after its own commits.
type signals struct{ changed, notices events.Signal }

func (s *Service) build(ctx context.Context) error {
	b := s.base
	if s.signer == nil {
		if err := s.openAuthority(ctx); err != nil {
			return err
		}
	}
	witness := &ca.Witness{Signer: s.signer}
	if rotating, ok := s.signer.(ca.Rotating); ok {
		witness.Signer = trust.Follow(b.DB, b.Numbered, rotating)
	}
	b.Health.Watch("ca", witness.Check)
	if err := s.openKeys(ctx); err != nil {
		return err
	}
	lc, err := b.Peer("lifecycle", s.cfg.Peers.Lifecycle, nil)
	if err != nil {
		return err
	}
	metrics := b.Registry.ForService(b.Name)
	wakes := &signals{}
	if err := s.openProfiles(ctx, wakes); err != nil {
		return err
	}
	identities, err := identity.New(identity.Deps{
		Logger: b.Logger, Pool: b.DB, Keys: &s.keys.join, Replica: b.ReplicaID, Wake: b.Wake, Changed: &wakes.changed,
		Notices: &wakes.notices, Audit: b.Audit, Policy: b.Policy,
	})
	if err != nil {
		return err
	}
	notifier, err := fences.New(fences.Deps{
		Logger: b.Logger, Pool: b.DB, Gate: lifecyclev1connect.NewGateServiceClient(lc.HTTP, lc.BaseURL, lc.Options...),
		Notices: &wakes.notices, Wake: b.Wake,
		Numbered: b.Numbered,
	}, fences.Config{})
	if err != nil {
		return err
	}
	enroller, err := enrol.New(enrol.Deps{
		Logger: b.Logger, Registerer: metrics, Pool: b.DB, Signer: witness, Policy: b.Policy, Profiles: s.profiles,
		TaskKeys: s.keys.taskKeys, RecoveryTokens: s.keys.tokens, JoinStates: &s.keys.join, Wake: b.Wake,
		Changed: &wakes.changed, Notices: &wakes.notices, Audit: b.Audit,
	}, enrol.Config{
		TrustDomain: b.Config.TrustDomain, ClaimLease: s.cfg.ClaimLease, MintWait: s.cfg.MintWait,
		SignTimeout: s.cfg.ClaimLease * 7 / 10, PerToken: s.cfg.EnrollPerTokenSecond,
		PerTokenBurst: s.cfg.EnrollPerTokenBurst, PerSecond: s.cfg.EnrollPerSecond, Burst: s.cfg.EnrollBurst,
	})
	if err != nil {
		return err
	}
	prepared, err := instance.New(instance.Deps{
		Logger: b.Logger, Pool: b.DB, Wake: b.Wake, Changed: &wakes.changed, Notices: &wakes.notices,
	}, instance.Config{LaunchSecretLife: s.cfg.LaunchSecretLife})
	if err != nil {
		return err
	}
	poller, err := authority.New(authority.Deps{
		Logger: b.Logger, Registerer: metrics, Pool: b.DB,
		Changed: &wakes.changed, Numbered: b.Numbered, Profiles: s.profiles.Authority,
	}, authority.Config{RetiredFor: s.cfg.RetiredFor})
	if err != nil {
		return err
	}
	admin, err := policyadmin.New(policyadmin.Deps{Logger: b.Logger, Pool: b.DB, Wake: b.Wake, Audit: b.Audit})
	if err != nil {
		return err
	}
	ends := slices.Clone(cuts)
	var indexes []background.Job
	if s.castore != nil {
		ends = append(ends, s.castore.Cuts()...)
		indexes = append(indexes, s.castore.Job(b.Config.RetentionSweep))
	}
	walk, err := b.Retention(ctx, ends...)
	if err != nil {
		return err
	}
	sweeps, err := newBackground(background.Deps{Pool: b.DB, Logger: b.Logger, Registerer: metrics}, enroller, b.Wake,
		s.cfg.SweepEvery, b.Policy, walk, storage.Watch{DB: b.DB, Policy: b.Policy, Volume: s.cfg.DatabaseVolume}, indexes...)
	if err != nil {
		return err
	}
	if err := s.serveInternal(ctx, identities, prepared, enroller, poller, admin); err != nil {
		return err
	}
	err = errors.Join(s.addWatchdog(lc), s.addDrift(lc), s.addRollback(), s.addKeys(), s.addTokens(),
		s.addBundles(enroller), s.addTrust(witness, &wakes.changed), s.addProfiles(), s.serveEnrolment(ctx, enroller))
	if err != nil {
		return err
	}
	b.Health.Ready("authority", poller.Health)
	b.Add(
		app.Task{Name: "fences", Phase: app.PhaseLeases, Run: notifier.Run},
		app.Task{Name: "authority", Phase: app.PhaseLeases, Run: poller.Run},
		app.Task{Name: "background", Run: sweeps.Run},
	)
	return nil
}

func (s *Service) openAuthority(ctx context.Context) error {
	if process := s.cfg.CAProcess; process.URL != "" {
		signer, err := ca.Dial(ca.RemoteConfig{
			URL: process.URL, RootsPath: process.RootsFile, Provisioner: process.Provisioner, ProvisionerPath: process.KeyFile,
			TrustDomain: s.base.Config.TrustDomain,
		})
		if err != nil {
			return err
		}
		s.signer, s.owned = signer, true
		return nil
	}
	cfg := ca.Config{Dir: s.cfg.CADir, TrustDomain: s.base.Config.TrustDomain, Follows: true}
	if s.cfg.CADatabaseURLFile != "" {
		secret, err := s.cfg.CADatabaseURLFile.Read()
		if err != nil {
			return fmt.Errorf("read authority's database url: %w", err)
		}
		cfg.DatabaseURL = secret.Reveal()
	}
	signer, err := ca.Open(cfg)
	if err != nil {
		return err
	}
	s.signer, s.owned = signer, true
	if cfg.DatabaseURL != "" {
		s.castore, err = castore.Open(ctx, cfg.DatabaseURL)
	}
	return err
}

func (s *Service) serveInternal(
	ctx context.Context, identities *identity.Identities, prepared *instance.Instances, enroller *enrol.Enroller,
	poller *authority.Poller, admin *policyadmin.Server,
) error {
	var err error
	if s.internal, err = s.base.InternalServer(ctx, s.keys.persons); err != nil {
		return err
	}
	rows := reannounce.NewServer(s.base.DB, s.base.Wake.Notify,
		append(slices.Concat(watchdog.Announced(), fleet.Announced(), judge.Announced()), identity.Announced())...)
	opts, mount := s.internal.HandlerOptions(), s.internal.Mount
	return errors.Join(
		mount(recoveryv1connect.NewSessionServiceHandler(
			&sessions{
				identities: identities, enroller: enroller, poller: poller, policy: s.base.Policy, profiles: s.profiles,
			}, opts...)),
		mount(commonv1connect.NewAnnounceServiceHandler(rows, opts...)),
		mount(recoveryv1connect.NewInstanceServiceHandler(&instances{instances: prepared}, opts...)),
		mount(recoveryv1connect.NewIdentityServiceHandler(
			&persons{identities: identities, enroller: enroller, audit: s.base.Audit}, opts...)),
		mount(recoveryv1connect.NewPolicyServiceHandler(admin, opts...)),
	)
}

func (s *Service) serveEnrolment(ctx context.Context, enroller *enrol.Enroller) error {
	if s.cfg.EnrollListen == "" {
		return nil
	}
	var err error
	s.enroll, err = port.New(ctx, port.Deps{
		Logger: s.base.Logger, Registerer: s.base.Registry.ForService(s.base.Name), Translate: pg.Fault,
	}, port.Config{
		Name: "enrollment", Addr: s.cfg.EnrollListen, MaxReadBytes: 64 << 10, MaxStreams: 16,
		// Any client can connect to this port, so a slow client must not keep a connection for long.
		RequestTimeout: 15 * time.Second, IdleTimeout: 10 * time.Second,
		TLS: pki.ServerConfig{Store: s.base.Store, TrustDomain: s.base.Config.TrustDomain},
	})
	if err != nil {
		return fmt.Errorf("open enrolment port: %w", err)
	}
	s.base.Add(app.Task{Name: "enrolment", Phase: app.PhaseDrain, Run: s.enroll.Run})
	return s.enroll.Mount(recoveryv1connect.NewEnrollmentServiceHandler(&enrolment{enroller: enroller},
		s.enroll.HandlerOptions()...))
}

// addRollback mounts the verbs of rollback mode and adds the task that follows the mode. It must be called after the
// internal port is made.
func (s *Service) addRollback() error {
	b := s.base
	mode, err := rollback.New(rollback.Deps{Logger: b.Logger, Pool: b.DB, Wake: b.Wake, Audit: b.Audit})
	if err != nil {
		return err
	}
	b.Add(app.Task{Name: "rollback", Run: mode.Run})
	return s.internal.Mount(recoveryv1connect.NewRollbackServiceHandler(mode, s.internal.HandlerOptions()...))
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

func (s *Service) closeAuthority() {
	if !s.owned {
		return
	}
	s.owned = false
	if s.castore != nil {
		s.castore.Close()
	}
	if err := s.signer.Close(); err != nil {
		s.base.Logger.Warn("closing the authority failed", slog.Any(obs.KeyError, err))
	}
}

// Addr returns the address of the internal port, which other services call.
func (s *Service) Addr() string { return s.internal.Addr().String() }

// EnrollAddr returns the address at which machines enrol; empty if this replica serves no enrolment.
func (s *Service) EnrollAddr() string {
	if s.enroll == nil {
		return ""
	}
	return s.enroll.Addr().String()
}

// OpsAddr returns the address at which metrics and health are served.
func (s *Service) OpsAddr() string { return s.base.OpsAddr() }

// ReplicaID returns the id of this replica.
func (s *Service) ReplicaID() string { return s.base.ReplicaID }
