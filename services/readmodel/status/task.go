package status

import (
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
)

// CurrentTask reports whether a task is current: it runs, or may still start. A task that expired or ended is history.
func CurrentTask(t *lifecyclev1.Task, now time.Time) bool {
	switch t.GetState() { // the others have ended
	case commonv1.TaskState_TASK_STATE_RUNNING:
		return true
	case commonv1.TaskState_TASK_STATE_QUEUED, commonv1.TaskState_TASK_STATE_DISPATCHED,
		commonv1.TaskState_TASK_STATE_DELIVERED:
		return t.GetExpiresAt() == nil || t.GetExpiresAt().AsTime().After(now)
	default:
		return false
	}
}
