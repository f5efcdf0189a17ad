package nodes

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// A task that is not taken in time sends its reader to the node; one that runs does not.
func TestATaskThatIsNotTakenNamesItsNode(t *testing.T) {
	for state, want := range map[commonv1.TaskState]bool{
		commonv1.TaskState_TASK_STATE_QUEUED:  true,
		commonv1.TaskState_TASK_STATE_RUNNING: false,
	} {
		err := taskOutcome(&readmodelv1.Task{TaskId: "the-task", NodeId: "the-node", State: state}, time.Second,
			kit.ErrWaited)
		e, ok := errors.AsType[*exit.Error](err)
		if !ok {
			t.Fatalf("%s: %v", state, err)
		}
		if strings.Contains(e.Remedy, "gpuaas nodes get the-node") != want ||
			!strings.Contains(e.Remedy, "gpuaas tasks get the-task") {
			t.Errorf("%s: %q", state, e.Remedy)
		}
	}
}
