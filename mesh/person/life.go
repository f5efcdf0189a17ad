package person

import (
	"context"
	"errors"
	"fmt"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/app"
)

// patience is how long one state of a workspace may be waited for.
const patience = 3 * time.Minute

// Provision makes a workspace of a tenant, and returns it once it is active.
func (c *Client) Provision(ctx context.Context, tenant, name string, placement commonv1.PlacementDriver) (
	*readmodelv1.Workspace, error,
) {
	_, err := c.Command.CreateWorkspace(ctx, &readmodelv1.CreateWorkspaceRequest{
		Tenant: tenant, Name: name, IdempotencyKey: name, Spec: &lifecyclev1.WorkspaceSpec{Placement: placement},
	})
	if err != nil {
		return nil, fmt.Errorf("create workspace %s: %w", name, err)
	}
	return c.await(ctx, tenant+"/"+name, commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, 0)
}

// RecreateAndEnd recreates a workspace and decommissions it, and returns when both have ended.
func (c *Client) RecreateAndEnd(ctx context.Context, ws *readmodelv1.Workspace, reason string) error {
	for _, step := range []struct {
		kind  commonv1.OperationKind
		state commonv1.WorkspaceState
		after int64 // the epoch
	}{
		{
			commonv1.OperationKind_OPERATION_KIND_RECREATE, commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, ws.GetEpoch(),
		},
		{
			commonv1.OperationKind_OPERATION_KIND_DECOMMISSION, commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED, 0,
		},
	} {
		_, err := c.Command.OperateWorkspace(ctx, &readmodelv1.OperateWorkspaceRequest{
			Workspace: ws.GetWorkspaceId(), Kind: step.kind, Reason: reason,
			IdempotencyKey: fmt.Sprintf("%s-%d", ws.GetName(), step.kind),
		})
		if err != nil {
			return fmt.Errorf("ask for %s of workspace %s: %w", step.kind, ws.GetName(), err)
		}
		if _, err := c.await(ctx, ws.GetWorkspaceId(), step.state, step.after); err != nil {
			return err
		}
	}
	return nil
}

// await returns a workspace once it is in a state, in an epoch after the given one.
func (c *Client) await(ctx context.Context, ref string, state commonv1.WorkspaceState, after int64) (
	*readmodelv1.Workspace, error,
) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		answer, err := c.Query.GetWorkspace(ctx, &readmodelv1.GetWorkspaceRequest{Workspace: ref})
		ws := answer.GetWorkspace()
		if err == nil && ws.GetState() == state && ws.GetEpoch() > after {
			return ws, nil
		}
		if !app.Sleep(ctx, 50*time.Millisecond) {
			return nil, errors.Join(fmt.Errorf("workspace %s is %s in epoch %d, and not %s after epoch %d", ref, ws.GetState(),
				ws.GetEpoch(), state, after), err)
		}
	}
}
