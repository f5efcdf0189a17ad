package gateway

import (
	"context"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/services/readmodel/gateway/caller"
	"github.com/gpuaas/mesh/services/readmodel/gateway/forward"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// outputWithin is how long a read of output may take; lifecycle and nodeapi wait a little less.
const outputWithin = 9 * time.Second

// ReadOutput forwards a read of a workload's output to lifecycle. Readmodel keeps none of the output.
func (q *Query) ReadOutput(ctx context.Context, req *readmodelv1.ReadOutputRequest) (*readmodelv1.ReadOutputResponse,
	error,
) {
	scope, err := caller.ScopeOf(ctx)
	if err != nil {
		return nil, err
	}
	if !scope.Outputs() {
		return nil, fault.New(commonv1.Reason_REASON_PERMISSION_DENIED,
			"the output of workloads is for people of their tenant and for operators")
	}
	// The workspace may have just been created, so the lookup waits for the projection as a command's does.
	t, err := caller.Find(ctx, q.deps.Reads, (*view.Snapshot).Target, req.GetWorkspace())
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, outputWithin)
	defer cancel()
	answer, err := q.deps.Owners.Outputs.ReadOutput(ctx, &lifecyclev1.ReadOutputRequest{
		WorkspaceId: t.Workspace.GetWorkspaceId(), Workload: req.GetWorkload(), Previous: req.GetPrevious(),
		From: req.GetFrom(), MaxBytes: req.GetMaxBytes(),
	})
	return &readmodelv1.ReadOutputResponse{Workload: answer.GetWorkload(), Output: answer.GetOutput()},
		forward.RefusedOn(ctx, "lifecycle", t, err)
}
