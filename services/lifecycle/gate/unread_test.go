package gate_test

import (
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
)

// An agent of a newer build serves a type that this build does not know: the gate shows the others, and the type is
// reported.
func TestAGateShowsTheTypesThatItKnows(t *testing.T) {
	aside := testkit.SetAside(t, "gate")
	shown := gate.Gate{NodeID: ids.New(), TaskTypes: []string{"storage.newer", "storage.allocate"}}.Proto()
	types := shown.GetTaskTypes()
	if len(types) != 1 || types[0] != commonv1.TaskType_TASK_TYPE_STORAGE_ALLOCATE {
		t.Errorf("it shows %v", types)
	}
	if n := aside(); n != 1 {
		t.Errorf("%d reported", n)
	}
}
