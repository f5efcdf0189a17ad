package readmodel

import (
	"context"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/common/v1/commonv1connect"
	"github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1/lifecyclev1connect"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/service"
	"github.com/gpuaas/mesh/services/readmodel/gateway/forward"
	"github.com/gpuaas/mesh/services/readmodel/gateway/meshstatus"
	"github.com/gpuaas/mesh/services/readmodel/project"
)

// clients are the clients of the services that own the state.
type clients struct {
	owners     forward.Owners
	probes     []meshstatus.Probe
	announcers []project.Owner
}

// openOwners makes the clients of the services that own the state.
func (s *Service) openOwners(ctx context.Context) error {
	b := s.base
	asserter, err := s.asserter(ctx)
	if err != nil {
		return err
	}
	rc, err := b.Peer("recovery", s.cfg.Peers.Recovery, asserter)
	if err != nil {
		return err
	}
	lc, err := b.Peer("lifecycle", s.cfg.Peers.Lifecycle, asserter)
	if err != nil {
		return err
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
	s.clients = clients{
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
			probe("recovery", rc, "ca", "ingress_trust", "configured_profile", service.PartDatabaseRoom),
		},
	}
	return nil
}
