package kit

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/stage"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// Retire decommissions a workspace at the end of a drill and checks that nothing of it is left anywhere.
func (r *Run) Retire(ctx context.Context, id string) error {
	m := r.Mesh
	if _, err := m.Operate(ctx, id, commonv1.OperationKind_OPERATION_KIND_DECOMMISSION); err != nil {
		return stage.At(stage.Evidence, err)
	}
	if err := m.AwaitState(ctx, id, commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED, await.Limit); err != nil {
		return stage.At(stage.Evidence, err)
	}
	err := await.Until(ctx, "everything of it to be gone", await.Patience,
		func(ctx context.Context) error { return m.NothingLeft(ctx, id) })
	if err == nil {
		r.Note("decommissioned: no claim, no instance, no process is left")
	}
	return stage.At(stage.Evidence, err)
}

// Leave removes, as well as it can, the remains of a failed drill, so that the next one finds a healthy mesh.
func (r *Run) Leave(ctx context.Context, id string) {
	r.Finally(ctx, func(ctx context.Context) { r.leave(ctx, id) })
}

func (r *Run) leave(ctx context.Context, id string) {
	m := r.Mesh
	asked := map[commonv1.OperationKind]time.Time{}
	// Close ends what is still there afterwards.
	_ = await.Until(ctx, "the drill's workspace to go", 2*time.Minute, func(ctx context.Context) error {
		ws, err := m.Workspace(ctx, id)
		if err != nil {
			return err
		}
		kind := commonv1.OperationKind_OPERATION_KIND_CANCEL
		switch ws.GetState() { //nolint:exhaustive // the others are on their way
		case commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED:
			return nil
		case commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
			commonv1.WorkspaceState_WORKSPACE_STATE_STUCK:
			kind = commonv1.OperationKind_OPERATION_KIND_DECOMMISSION
		}
		if time.Since(asked[kind]) > 5*time.Second {
			asked[kind] = time.Now()
			_, err = m.Operate(ctx, id, kind)
		}
		return errors.Join(fmt.Errorf("it is %s", names.Of(ws.GetState())), err)
	})
}
