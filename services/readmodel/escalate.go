package readmodel

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/escalation"
	"github.com/gpuaas/mesh/services/readmodel/gateway"
	"github.com/gpuaas/mesh/services/readmodel/gateway/caller"
	"github.com/gpuaas/mesh/services/readmodel/gateway/forward"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// escalation returns the service of bundles.
func (s *Service) escalation(deps gateway.Deps) *gateway.Escalation {
	c := s.clients
	parts := make([]escalation.Part, len(c.probes))
	for i, p := range c.probes {
		parts[i] = escalation.Part{Name: p.Name, Ask: p.Ask}
	}
	collector := escalation.New(escalation.Deps{
		Logger: s.base.Logger, Reader: deps.Reads.Reader, Parts: parts,
		Policy: func(ctx context.Context) (*recoveryv1.GetPolicyResponse, error) {
			return c.owners.Policies.GetPolicy(ctx, &recoveryv1.GetPolicyRequest{})
		},
		Actions: func(ctx context.Context, workspaceID string) (*lifecyclev1.GetActionsResponse, error) {
			t, err := caller.Get(ctx, deps.Reads, "", (*view.Snapshot).Target, workspaceID)
			if err != nil {
				return nil, err
			}
			answer, err := c.owners.Workspaces.GetActions(ctx, &lifecyclev1.GetActionsRequest{WorkspaceId: workspaceID})
			if err != nil {
				return nil, forward.RefusedOn(ctx, "lifecycle", t, err)
			}
			answer.Actions = forward.Actions(ctx, t, answer.GetActions())
			return answer, nil
		},
	})
	return gateway.NewEscalation(deps, collector, s.record)
}

// record writes an audit entry for an action that readmodel itself carried out for a person.
func (s *Service) record(ctx context.Context, e audit.Entry) error {
	err := pg.InTx(ctx, s.base.DB, func(ctx context.Context, tx pgx.Tx) error {
		_, err := s.base.Audit.Record(ctx, tx, e)
		return err
	})
	if err != nil {
		return fmt.Errorf("audit: %w", err)
	}
	s.base.Wake.Notify()
	return nil
}
