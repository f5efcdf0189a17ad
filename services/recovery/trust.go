package recovery

import (
	"context"
	"errors"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/services/recovery/tokens"
	"github.com/gpuaas/mesh/services/recovery/trust"
	"github.com/gpuaas/mesh/services/recovery/trust/absence"
)

// partIngressTrust is the part of this service's health that reports whether the ingress trusts the authority.
const partIngressTrust = "ingress_trust"

// addTrust builds this replica's part in the preflight, and mounts its verbs.
func (s *Service) addTrust(context.Context) error {
	b := s.base
	rotating, _ := s.signer.(ca.Rotating)
	preflight, err := trust.New(trust.Deps{
		Logger: b.Logger, Pool: b.DB, Signer: s.witness, Rotating: rotating, Changed: &s.changed, Audit: b.Audit,
		Services: b.Services, TrustDomain: b.Config.TrustDomain,
		Replica: b.ReplicaID, Address: func() string { return s.profiles.Default().GetApiUrl() },
		AgentRoots: s.announcedRoots,
		Wake:       b.Wake, Numbered: b.Numbered,
		Stopped: func(ctx context.Context, tx pgx.Tx, stop trust.Stop) error {
			return tokens.Untrusted(ctx, tx, stop.From, stop.Until) // time in which nothing is issued ages no token
		},
		Unanswered: func(ctx context.Context, tx pgx.Tx, stop absence.Stop) error {
			return tokens.Unanswered(ctx, tx, stop.From, stop.Until)
		},
	}, trust.Config{Again: s.cfg.PreflightConfirm, Overlap: 6 * s.cfg.ClaimLease})
	if err != nil {
		return err
	}
	b.Health.Watch(partIngressTrust, preflight.Health)
	b.Add(app.Task{Name: "ca-preflight", Run: preflight.Run})
	opts := s.internal.HandlerOptions()
	return errors.Join(s.internal.Mount(recoveryv1connect.NewTrustServiceHandler(preflight, opts...)),
		s.internal.Mount(recoveryv1connect.NewAuthorityServiceHandler(preflight, opts...)))
}

// announcedRoots returns the roots of the profile that agents are told, with those of the services' issuer, which
// agents learn of when it has changed. It returns nil if there are none.
func (s *Service) announcedRoots() *pki.Bundle {
	published, err := pki.DecodeCertificates(s.profiles.Default().GetCaBundlePem())
	if err != nil {
		return nil
	}
	all, err := pki.NewBundle(slices.Concat(published, s.base.Services.Roots())...)
	if err != nil {
		return nil
	}
	return all
}
