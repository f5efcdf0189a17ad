package drill

import (
	"context"
	"errors"
	"fmt"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// retire decommissions a workspace at the end of a drill and checks that nothing of it is left anywhere.
func (r *Run) retire(ctx context.Context, id string) error {
	m := r.Mesh
	if _, err := m.operate(ctx, id, commonv1.OperationKind_OPERATION_KIND_DECOMMISSION); err != nil {
		return at(StageEvidence, err)
	}
	if err := m.awaitState(ctx, id, commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED, settle); err != nil {
		return at(StageEvidence, err)
	}
	err := await(ctx, "everything of it to be gone", patience,
		func(ctx context.Context) error { return m.nothingLeft(ctx, id) })
	if err == nil {
		r.note("decommissioned: no claim, no instance, no process is left")
	}
	return at(StageEvidence, err)
}

// leave removes, as well as it can, the remains of a failed drill, so that the next one finds a healthy mesh.
func (r *Run) leave(ctx context.Context, id string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Minute)
	defer cancel()
	m := r.Mesh
	asked := map[commonv1.OperationKind]time.Time{}
	// Close ends what is still there afterwards.
	_ = await(ctx, "the drill's workspace to go", 2*time.Minute, func(ctx context.Context) error {
		ws, err := m.workspace(ctx, id)
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
			_, err = m.operate(ctx, id, kind)
		}
		return errors.Join(fmt.Errorf("it is %s", names.Of(ws.GetState())), err)
	})
}
