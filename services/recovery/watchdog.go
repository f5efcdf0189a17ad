package recovery

import (
	"context"

	"github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1/lifecyclev1connect"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/service"
	"github.com/gpuaas/mesh/services/recovery/watchdog"
)

// addWatchdog builds this replica's watchdog and mounts its verbs. It comes after the internal port.
func (s *Service) addWatchdog(lifecycle service.Client) error {
	b := s.base
	dog, err := watchdog.New(watchdog.Deps{
		Logger: b.Logger, Registerer: b.Registry.ForService(b.Name), Pool: b.DB, Policy: b.Policy, Wake: b.Wake,
		Numbered: b.Numbered, Replica: b.ReplicaID,
		Lifecycle: lifecyclev1connect.NewWorkspaceServiceClient(lifecycle.HTTP, lifecycle.BaseURL, lifecycle.Options...),
	}, watchdog.Config{ForgetAfter: s.cfg.ForgetAfter})
	if err != nil {
		return err
	}
	if err := s.internal.Mount(recoveryv1connect.NewWatchdogServiceHandler(dog,
		s.internal.HandlerOptions()...)); err != nil {
		return err
	}
	b.Consumes(watchdog.ConsumerName)
	b.Add(
		app.Task{Name: "watchdog-facts", Run: dog.Consume},
		app.Task{Name: "watchdog", Run: dog.Run},
		app.Task{Name: "watchdog-counts", Run: func(ctx context.Context) error {
			return app.Every(ctx, b.Logger, "watchdog-counts", watchdog.MeasureEvery, dog.Measure)
		}},
	)
	return nil
}
