package operation

import (
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// TestTheRefusalOfAReleaseHasANextAction: an allocation whose release has not failed is released by its workspace.
func TestTheRefusalOfAReleaseHasANextAction(t *testing.T) {
	for _, state := range names.All[commonv1.AllocationState]() {
		f := &failedRelease{}
		f.allocated.State = state
		err := f.refusal()
		if state == commonv1.AllocationState_ALLOCATION_STATE_RELEASE_FAILED {
			if err != nil {
				t.Errorf("a failed release: %v", err)
			}
			continue
		}
		if refused, ok := fault.As(err); !ok || !strings.Contains(refused.Remedy, "gpuaas workspaces decommission") {
			t.Errorf("%s: %v", names.Of(state), err)
		}
	}
}
