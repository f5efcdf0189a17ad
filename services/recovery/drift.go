package recovery

import (
	"context"

	"github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1/lifecyclev1connect"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/services/recovery/actions"
	"github.com/gpuaas/mesh/services/recovery/diagnostics"
	"github.com/gpuaas/mesh/services/recovery/drift/ask"
	"github.com/gpuaas/mesh/services/recovery/drift/collect"
	"github.com/gpuaas/mesh/services/recovery/drift/judge"
)

// addDrift builds this replica's part in judging what is wrong with nodes, and in proving that they are healthy again,
// and mounts what is asked of it.
func (s *Service) addDrift(context.Context) error {
	b, lc := s.base, s.lifecycle
	asker, err := ask.New(ask.Deps{
		Logger: b.Logger, Pool: b.DB,
		Records: lifecyclev1connect.NewDiagnosticsServiceClient(lc.HTTP, lc.BaseURL, lc.Options...),
	})
	if err != nil {
		return err
	}
	optional, err := s.cfg.optionalTypes()
	if err != nil {
		return err
	}
	judging, err := judge.New(judge.Deps{
		Logger: b.Logger, Pool: b.DB, Policy: b.Policy, Wake: b.Wake, Numbered: b.Numbered, Roots: s.signer.Roots,
		Probes: lifecyclev1connect.NewProbeServiceClient(lc.HTTP, lc.BaseURL, lc.Options...),
		Evidence: collect.Settings{
			AddressesFresh: s.cfg.AddressesFresh, RejectedFresh: s.cfg.RejectedFresh, RefusedFresh: s.cfg.RefusedFresh,
			OptionalTypes: optional,
		},
		OutageAfter: s.cfg.OutageAfter,
		Asked:       asker.Nudge,
	})
	if err != nil {
		return err
	}
	records, err := diagnostics.New(diagnostics.Deps{
		Logger: b.Logger, Pool: b.DB, Wake: b.Wake, Audit: b.Audit, Merged: judging.Nudge,
		Fresh: s.cfg.HostRecordFresh, Registerer: b.Registry.ForService(b.Name),
	})
	if err != nil {
		return err
	}
	options := s.internal.HandlerOptions()
	err = s.internal.Mount(recoveryv1connect.NewHostFactsServiceHandler(judge.NewHostFacts(judging, b.Audit), options...))
	if err != nil {
		return err
	}
	err = s.internal.Mount(recoveryv1connect.NewHealthServiceHandler(judge.NewServer(judging), options...))
	if err != nil {
		return err
	}
	err = s.internal.Mount(recoveryv1connect.NewActionServiceHandler(actions.NewServer(b.DB), options...))
	if err != nil {
		return err
	}
	b.Consumes(collect.ConsumerName)
	b.Add(
		app.Task{Name: "drift-evidence", Run: judging.Consume},
		app.Task{Name: "drift", Run: judging.Run},
		app.Task{Name: "drift-probes", Run: judging.Probe},
		app.Task{Name: "drift-records", Run: asker.Run},
		app.Task{Name: "drift-authority", Run: judging.Authority},
	)
	return s.internal.Mount(recoveryv1connect.NewDiagnosticsServiceHandler(records, options...))
}
