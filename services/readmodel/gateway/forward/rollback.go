package forward

import (
	"context"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// Rollbacks serves RollbackService. Every answer comes from recovery, which owns the mode; readmodel keeps no copy.
type Rollbacks struct{ owners Owners }

// NewRollbacks returns the server.
func NewRollbacks(owners Owners) *Rollbacks { return &Rollbacks{owners: owners} }

// GetRollback returns the state of rollback mode.
func (r *Rollbacks) GetRollback(
	ctx context.Context, _ *readmodelv1.GetRollbackRequest,
) (*readmodelv1.GetRollbackResponse, error) {
	answer, err := operator(ctx, "recovery", r.owners.Rollback.GetRollback, &recoveryv1.GetRollbackRequest{})
	return &readmodelv1.GetRollbackResponse{Rollback: answer.GetRollback()}, err
}

// AcceptRollback ends rollback mode on a person's attestation.
func (r *Rollbacks) AcceptRollback(
	ctx context.Context, req *readmodelv1.AcceptRollbackRequest,
) (*readmodelv1.AcceptRollbackResponse, error) {
	answer, err := operator(ctx, "recovery", r.owners.Rollback.AcceptRollback,
		&recoveryv1.AcceptRollbackRequest{Reason: req.GetReason()})
	return &readmodelv1.AcceptRollbackResponse{Rollback: answer.GetRollback(), Pos: answer.GetPos()}, err
}
