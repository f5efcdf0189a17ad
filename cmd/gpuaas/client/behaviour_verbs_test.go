package client_test

import (
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// A verb on an open run waits for the end of that run, which is the run's own: failed, when it was told to turn back.
func TestAVerbOnAnOpenRunWaitsForItsEnd(t *testing.T) {
	const (
		create       = commonv1.OperationKind_OPERATION_KIND_CREATE
		recreate     = commonv1.OperationKind_OPERATION_KIND_RECREATE
		decommission = commonv1.OperationKind_OPERATION_KIND_DECOMMISSION
		active       = commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE
		failed       = commonv1.WorkspaceState_WORKSPACE_STATE_FAILED
		gone         = commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED
	)
	for _, tt := range []struct {
		name string
		args []string
		run  commonv1.OperationKind
		ends commonv1.WorkspaceState
		exit int
	}{
		{name: "cancel of a create", args: []string{"cancel", "acme/demo2"}, run: create, ends: failed},
		{name: "cancel that came too late", args: []string{"cancel", "acme/demo2"}, run: create, ends: active, exit: 5},
		{name: "undo of a recreation", args: []string{"retry-undo", "acme/demo2"}, run: recreate, ends: failed},
		{name: "undo of a decommission", args: []string{"retry-undo", "acme/demo2"}, run: decommission, ends: gone},
		{
			name: "undo given up", args: []string{"skip-undo", "acme/demo2", "--reason", "it is gone", "--yes"}, run: create,
			ends: failed,
		},
		{name: "joined recreation", args: []string{"retry", "acme/demo2"}, run: recreate, ends: active},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := mesh(t)
			stock(f)
			always(f, "OperateWorkspace", &readmodelv1.OperateWorkspaceResponse{Operation: &lifecyclev1.Operation{
				OperationId: runID, WorkspaceId: workspaceID, Kind: tt.run, Epoch: 1, Pos: "2:77",
			}})
			always(f, "GetWorkspace", &readmodelv1.GetWorkspaceResponse{Workspace: workspace(tt.ends)})
			call(t, append(append([]string{"workspaces"}, tt.args...), "--wait")...).wants(t, tt.exit)
		})
	}
}
