package mesh

import (
	"context"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/drill/kit/await"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
)

// FreshName returns a name that no earlier drill has used.
func FreshName(prefix string) string {
	id := ids.New()
	return prefix + "-" + id[len(id)-8:]
}

// Create requests a workspace, again if the answer was lost.
func (m *Mesh) Create(ctx context.Context, name string, spec *lifecyclev1.WorkspaceSpec) (*lifecyclev1.Operation,
	error,
) {
	key := ids.New()
	return await.Answer(ctx, "create "+name, func(ctx context.Context) (*lifecyclev1.Operation, error) {
		resp, err := m.Client.Command.CreateWorkspace(ctx,
			&readmodelv1.CreateWorkspaceRequest{Tenant: Tenant, Name: name, Spec: spec, IdempotencyKey: key})
		return resp.GetOperation(), err
	})
}

// Operate requests a verb, as the command line does; again if the answer was lost.
func (m *Mesh) Operate(ctx context.Context, workspace string, kind commonv1.OperationKind) (*lifecyclev1.Operation,
	error,
) {
	key := ids.New()
	return await.Answer(ctx, names.Of(kind), func(ctx context.Context) (*lifecyclev1.Operation, error) {
		resp, err := m.Client.Command.OperateWorkspace(ctx, &readmodelv1.OperateWorkspaceRequest{
			Workspace: workspace, Kind: kind, Reason: "drill", IdempotencyKey: key,
		})
		return resp.GetOperation(), err
	})
}

// Workspace returns a workspace by its id or its name.
func (m *Mesh) Workspace(ctx context.Context, ref string) (*readmodelv1.Workspace, error) {
	resp, err := m.Client.Query.GetWorkspace(ctx, &readmodelv1.GetWorkspaceRequest{Workspace: ref})
	return resp.GetWorkspace(), err
}

// AwaitState waits until a workspace is in a state.
func (m *Mesh) AwaitState(ctx context.Context, ref string, want commonv1.WorkspaceState, limit time.Duration) error {
	return await.Until(ctx, ref+" to be "+names.Of(want), limit, func(ctx context.Context) error {
		w, err := m.Workspace(ctx, ref)
		if err != nil {
			return err
		}
		if w.GetState() != want {
			return fmt.Errorf("it is %s: %s %s %s", names.Of(w.GetState()), w.GetCurrentStep(), w.GetWhyWaiting(),
				w.GetLastError())
		}
		return nil
	})
}

// Claims returns the claims of a workspace that are not released.
func (m *Mesh) Claims(ctx context.Context, id string) ([]*lifecyclev1.Claim, error) {
	resp, err := m.Client.Query.ListClaims(ctx, &readmodelv1.ListClaimsRequest{PageSize: 500, WorkspaceId: id})
	return resp.GetItems(), err
}
