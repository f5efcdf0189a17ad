package recovery

import (
	"context"

	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/services/recovery/tokens"
)

// addTokens mounts the verbs of recovery tokens and adds the task that records when nothing was issued.
func (s *Service) addTokens(context.Context) error {
	b := s.base
	server, err := tokens.NewServer(tokens.Deps{
		Logger: b.Logger, Pool: b.DB, Policy: b.Policy, Wake: b.Wake, Audit: b.Audit,
		Profiles: s.profiles.Names,
	})
	if err != nil {
		return err
	}
	stops, err := tokens.NewStops(b.DB, b.Logger)
	if err != nil {
		return err
	}
	b.Add(app.Task{Name: "issuance-stops", Run: stops.Run})
	return s.internal.Mount(recoveryv1connect.NewTokenServiceHandler(server, s.internal.HandlerOptions()...))
}
