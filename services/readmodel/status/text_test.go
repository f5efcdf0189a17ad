package status_test

import (
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/services/readmodel/status"
)

// TestAFailedWorkloadIsItsUsersToCorrect checks that the user of a failed workload is told to correct it, and not to
// wait for an operator.
func TestAFailedWorkloadIsItsUsersToCorrect(t *testing.T) {
	const state = commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED
	operator := status.FamilyOf(state).Text
	for code, own := range map[string]bool{
		"workload_crash_loop": true, "workload_failed": true, "launch_failed": false, "no_capacity": false, "": false,
	} {
		w := &lifecyclev1.Workspace{State: commonv1.WorkspaceState_WORKSPACE_STATE_FAILED, LastErrorCode: code}
		text := status.TextOf(w, state)
		if own && !strings.HasPrefix(text, "Its own workload failed.") || !own && text != operator {
			t.Errorf("failed with %q: %s", code, text)
		}
		w.State = commonv1.WorkspaceState_WORKSPACE_STATE_STUCK
		if text := status.TextOf(w, state); text != operator {
			t.Errorf("stuck with %q: %s", code, text)
		}
	}
}
