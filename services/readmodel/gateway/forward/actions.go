package forward

import (
	"context"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// RecoveryActions serves ActionService. Every answer comes from recovery, which owns the actions; readmodel keeps no
// copy.
type RecoveryActions struct{ owners Owners }

// NewRecoveryActions returns the server.
func NewRecoveryActions(owners Owners) *RecoveryActions { return &RecoveryActions{owners: owners} }

// ListActions lists recovery actions.
func (a *RecoveryActions) ListActions(ctx context.Context, req *readmodelv1.ListActionsRequest) (
	*readmodelv1.ListActionsResponse, error,
) {
	answer, err := operator(ctx, "recovery", a.owners.Actions.ListActions, &recoveryv1.ListActionsRequest{
		NodeId: req.GetNodeId(), State: req.GetState(), PageSize: req.GetPageSize(), PageToken: req.GetPageToken(),
	})
	return &readmodelv1.ListActionsResponse{Items: answer.GetItems(), NextPageToken: answer.GetNextPageToken()}, err
}
