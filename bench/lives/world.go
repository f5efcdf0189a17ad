package lives

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/mesh/person"
)

const tenantName = "lives"

// patience is how long one state of a workspace may be waited for.
const patience = 3 * time.Minute

// world makes lives of workspaces as a person would.
type world struct {
	o      Options
	client *person.Client
	number atomic.Int64
}

func (w *world) tenant(ctx context.Context) error {
	if _, err := w.client.Command.CreateTenant(ctx, &readmodelv1.CreateTenantRequest{Name: tenantName}); err != nil {
		return fmt.Errorf("create the tenant: %w", err)
	}
	return nil
}

// many makes n lives, as many at once as the options say.
func (w *world) many(ctx context.Context, n int) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(w.o.Clients)
	for range n {
		if ctx.Err() != nil {
			break
		}
		group.Go(func() error { return w.one(ctx, fmt.Sprintf("w-%08d", w.number.Add(1))) })
	}
	return group.Wait()
}

// one creates a workspace, recreates it and decommissions it.
func (w *world) one(ctx context.Context, name string) error {
	_, err := w.client.Command.CreateWorkspace(ctx, &readmodelv1.CreateWorkspaceRequest{
		Tenant: tenantName, Name: name, IdempotencyKey: name, Spec: &lifecyclev1.WorkspaceSpec{Placement: w.o.Placement},
	})
	if err != nil {
		return fmt.Errorf("create workspace %s: %w", name, err)
	}
	ws, err := w.await(ctx, name, commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, 0)
	if err != nil {
		return err
	}
	for _, kind := range []commonv1.OperationKind{
		commonv1.OperationKind_OPERATION_KIND_RECREATE,
		commonv1.OperationKind_OPERATION_KIND_DECOMMISSION,
	} {
		_, err := w.client.Command.OperateWorkspace(ctx, &readmodelv1.OperateWorkspaceRequest{
			Workspace: ws.GetWorkspaceId(), Kind: kind, Reason: "bench", IdempotencyKey: fmt.Sprintf("%s-%d", name, kind),
		})
		if err != nil {
			return fmt.Errorf("ask for %s of workspace %s: %w", kind, name, err)
		}
		state, epoch := commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, ws.GetEpoch()
		if kind == commonv1.OperationKind_OPERATION_KIND_DECOMMISSION {
			state, epoch = commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED, 0
		}
		if _, err := w.await(ctx, ws.GetWorkspaceId(), state, epoch); err != nil {
			return err
		}
	}
	return nil
}

// await returns a workspace once it is in a state, in an epoch after the given one.
func (w *world) await(ctx context.Context, ref string, state commonv1.WorkspaceState,
	after int64,
) (*readmodelv1.Workspace, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if state == commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE && after == 0 {
		ref = tenantName + "/" + ref
	}
	for {
		answer, err := w.client.Query.GetWorkspace(ctx, &readmodelv1.GetWorkspaceRequest{Workspace: ref})
		if ws := answer.GetWorkspace(); err == nil && ws.GetState() == state && ws.GetEpoch() > after {
			return ws, nil
		}
		if !app.Sleep(ctx, 50*time.Millisecond) {
			return nil, errors.Join(fmt.Errorf("workspace %s is %s in epoch %d, and not %s after epoch %d", ref,
				answer.GetWorkspace().GetState(), answer.GetWorkspace().GetEpoch(), state, after), err)
		}
	}
}
