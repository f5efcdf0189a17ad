package recovery

import (
	"context"

	"github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1/lifecyclev1connect"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/services/recovery/fleet"
	"github.com/gpuaas/mesh/services/recovery/watchdog"
)

// addWatchdog builds this replica's watchdog and its part in the decisions about the fleet, and mounts their verbs.
func (s *Service) addWatchdog(context.Context) error {
	b := s.base
	registerer := b.Registry.ForService(b.Name)
	all, err := fleet.New(fleet.Deps{
		Logger: b.Logger, Registerer: registerer, Pool: b.DB, Policy: b.Policy, Wake: b.Wake,
	}, fleet.Config{})
	if err != nil {
		return err
	}
	dog, err := watchdog.New(watchdog.Deps{
		Logger: b.Logger, Registerer: registerer, Pool: b.DB, Policy: b.Policy, Fleet: all, Wake: b.Wake,
		Numbered: b.Numbered, Replica: b.ReplicaID,
		Lifecycle: lifecyclev1connect.NewWorkspaceServiceClient(s.lifecycle.HTTP, s.lifecycle.BaseURL,
			s.lifecycle.Options...),
	}, watchdog.Config{ForgetAfter: s.cfg.ForgetAfter})
	if err != nil {
		return err
	}
	b.Consumes(watchdog.ConsumerName)
	b.Add(
		app.Task{Name: "watchdog-facts", Run: dog.Consume},
		app.Task{Name: "watchdog", Run: dog.Run},
		app.Task{Name: "watchdog-counts", Run: func(ctx context.Context) error {
			return app.Every(ctx, b.Logger, "watchdog-counts", fleet.MeasureEvery, all.Measure)
		}},
	)
	return s.internal.Mount(recoveryv1connect.NewWatchdogServiceHandler(all, s.internal.HandlerOptions()...))
}
