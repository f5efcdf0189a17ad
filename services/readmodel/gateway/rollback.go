package gateway

import (
	"context"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// Rollbacks serves RollbackService: recovery owns the mode, and no copy of it is shown.
type Rollbacks struct{ deps Deps }

// NewRollbacks makes the server.
func NewRollbacks(deps Deps) *Rollbacks { return &Rollbacks{deps: deps} }

// GetRollback shows the mode.
func (r *Rollbacks) GetRollback(
	ctx context.Context, _ *readmodelv1.GetRollbackRequest,
) (*readmodelv1.GetRollbackResponse, error) {
	if err := operatorsOnly(ctx); err != nil {
		return nil, err
	}
	answer, err := r.deps.Owners.Rollback.GetRollback(ctx, &recoveryv1.GetRollbackRequest{})
	if err != nil {
		return nil, ownerError("recovery", err)
	}
	return &readmodelv1.GetRollbackResponse{Rollback: answer.GetRollback()}, nil
}

// AcceptRollback ends the mode on a person's word.
func (r *Rollbacks) AcceptRollback(
	ctx context.Context, req *readmodelv1.AcceptRollbackRequest,
) (*readmodelv1.AcceptRollbackResponse, error) {
	if err := operatorsOnly(ctx); err != nil {
		return nil, err
	}
	answer, err := r.deps.Owners.Rollback.AcceptRollback(ctx, &recoveryv1.AcceptRollbackRequest{Reason: req.GetReason()})
	if err != nil {
		return nil, ownerError("recovery", err)
	}
	return &readmodelv1.AcceptRollbackResponse{Rollback: answer.GetRollback(), Pos: answer.GetPos()}, nil
}
