package recovery

import (
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/services/recovery/drift"
)

// addDrift builds this replica's part in judging what is wrong with nodes.
func (s *Service) addDrift() error {
	b := s.base
	judge, err := drift.New(drift.Deps{
		Logger: b.Logger, Pool: b.DB, Policy: b.Policy, Wake: b.Wake, Numbered: b.Numbered,
	})
	if err != nil {
		return err
	}
	facts := recoveryv1connect.NewHostFactsServiceHandler
	if err := s.internal.Mount(facts(drift.NewHostFacts(judge, b.Audit), s.internal.HandlerOptions()...)); err != nil {
		return err
	}
	b.Consumes(drift.ConsumerName)
	b.Add(
		app.Task{Name: "drift-evidence", Run: judge.Consume},
		app.Task{Name: "drift", Run: judge.Run},
	)
	return nil
}
