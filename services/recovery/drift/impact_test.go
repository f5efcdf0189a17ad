package drift_test

import (
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/recovery/drift"
)

// Each reason has its impact, with why. One that touches a workspace gives it the family of the node.
func TestEveryReasonHasItsImpact(t *testing.T) {
	touching := 0
	for _, reason := range names.All[commonv1.DriftReason]() {
		impact := fault.ImpactOf(reason)
		row, _ := drift.RowOf(reason)
		if impact.Why == "" || impact.Why == fault.ImpactOf(4711).Why {
			t.Errorf("%s has no impact", names.Of(reason))
		}
		switch impact.Family {
		case commonv1.UserState_USER_STATE_NORMAL:
		case row.UserState:
			touching++
		default:
			t.Errorf("%s: workspaces are %s, and the node is %s", names.Of(reason), names.Of(impact.Family),
				names.Of(row.UserState))
		}
	}
	if touching != 5 {
		t.Errorf("%d reasons touch workspaces", touching)
	}
}
