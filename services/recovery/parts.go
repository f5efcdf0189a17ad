package recovery

import (
	"context"
	"errors"

	"github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1/lifecyclev1connect"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/services/recovery/authority"
	"github.com/gpuaas/mesh/services/recovery/enrol"
	"github.com/gpuaas/mesh/services/recovery/fences"
	"github.com/gpuaas/mesh/services/recovery/identity"
	"github.com/gpuaas/mesh/services/recovery/instance"
	"github.com/gpuaas/mesh/services/recovery/policyadmin"
	"github.com/gpuaas/mesh/services/recovery/profiles"
	"github.com/gpuaas/mesh/services/recovery/rollback"
)

func (s *Service) addIdentities(context.Context) error {
	b := s.base
	var err error
	s.identities, err = identity.New(identity.Deps{
		Logger: b.Logger, Pool: b.DB, Keys: &s.keys.join, Replica: b.ReplicaID, Wake: b.Wake, Changed: &s.changed,
		Notices: &s.notices, Audit: b.Audit, Policy: b.Policy,
	})
	return err
}

func (s *Service) addFences(context.Context) error {
	b, lc := s.base, s.lifecycle
	notifier, err := fences.New(fences.Deps{
		Logger: b.Logger, Pool: b.DB, Gate: lifecyclev1connect.NewGateServiceClient(lc.HTTP, lc.BaseURL, lc.Options...),
		Notices: &s.notices, Wake: b.Wake,
		Numbered: b.Numbered,
	}, fences.Config{})
	if err != nil {
		return err
	}
	b.Add(app.Task{Name: "fences", Phase: app.PhaseLeases, Run: notifier.Run})
	return nil
}

func (s *Service) addEnroller(context.Context) error {
	b := s.base
	var err error
	s.enroller, err = enrol.New(enrol.Deps{
		Logger: b.Logger, Registerer: b.Registry.ForService(b.Name), Pool: b.DB, Signer: s.witness, Policy: b.Policy,
		Profiles: s.profiles, TaskKeys: s.keys.taskKeys, RecoveryTokens: s.keys.tokens, JoinStates: &s.keys.join,
		Wake: b.Wake, Changed: &s.changed, Notices: &s.notices, Audit: b.Audit,
	}, enrol.Config{
		TrustDomain: b.Config.TrustDomain, ClaimLease: s.cfg.ClaimLease, MintWait: s.cfg.MintWait,
		SignTimeout: s.cfg.ClaimLease * 7 / 10, PerToken: s.cfg.EnrollPerTokenSecond,
		PerTokenBurst: s.cfg.EnrollPerTokenBurst, PerSecond: s.cfg.EnrollPerSecond, Burst: s.cfg.EnrollBurst,
	})
	if err != nil {
		return err
	}
	opts, mount := s.internal.HandlerOptions(), s.internal.Mount
	return errors.Join(
		mount(recoveryv1connect.NewIdentityServiceHandler(
			&persons{identities: s.identities, enroller: s.enroller, audit: b.Audit}, opts...)),
		mount(recoveryv1connect.NewBundleServiceHandler(&bundles{
			enroller: s.enroller, store: b.Store, trustDomain: b.Config.TrustDomain,
		}, opts...)))
}

func (s *Service) addInstances(context.Context) error {
	prepared, err := instance.New(instance.Deps{
		Logger: s.base.Logger, Pool: s.base.DB, Wake: s.base.Wake, Changed: &s.changed, Notices: &s.notices,
	}, instance.Config{LaunchSecretLife: s.cfg.LaunchSecretLife})
	if err != nil {
		return err
	}
	return s.internal.Mount(recoveryv1connect.NewInstanceServiceHandler(&instances{instances: prepared},
		s.internal.HandlerOptions()...))
}

// addAuthority adds the authority view, and mounts what nodeapi asks and reports of sessions.
func (s *Service) addAuthority(context.Context) error {
	b := s.base
	poller, err := authority.New(authority.Deps{
		Logger: b.Logger, Registerer: b.Registry.ForService(b.Name), Pool: b.DB,
		Changed: &s.changed, Numbered: b.Numbered, Profiles: s.profiles.Authority,
	}, authority.Config{RetiredFor: s.cfg.RetiredFor})
	if err != nil {
		return err
	}
	b.Health.Ready("authority", poller.Health)
	b.Add(app.Task{Name: "authority", Phase: app.PhaseLeases, Run: poller.Run})
	return s.internal.Mount(recoveryv1connect.NewSessionServiceHandler(&sessions{
		identities: s.identities, enroller: s.enroller, poller: poller, policy: b.Policy, profiles: s.profiles,
	}, s.internal.HandlerOptions()...))
}

// addPolicy mounts the verbs of policy keys and of profiles.
func (s *Service) addPolicy(context.Context) error {
	b := s.base
	admin, err := policyadmin.New(policyadmin.Deps{Logger: b.Logger, Pool: b.DB, Wake: b.Wake, Audit: b.Audit})
	if err != nil {
		return err
	}
	opts, mount := s.internal.HandlerOptions(), s.internal.Mount
	return errors.Join(
		mount(recoveryv1connect.NewPolicyServiceHandler(admin, opts...)),
		mount(recoveryv1connect.NewProfileServiceHandler(profiles.NewServer(s.profiles), opts...)))
}

// addRollback mounts the verbs of rollback mode and adds the task that follows the mode.
func (s *Service) addRollback(context.Context) error {
	b := s.base
	mode, err := rollback.New(rollback.Deps{Logger: b.Logger, Pool: b.DB, Wake: b.Wake, Audit: b.Audit})
	if err != nil {
		return err
	}
	b.Add(app.Task{Name: "rollback", Run: mode.Run})
	return s.internal.Mount(recoveryv1connect.NewRollbackServiceHandler(mode, s.internal.HandlerOptions()...))
}
