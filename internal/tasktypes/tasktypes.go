// Package tasktypes has the types of tasks that the control plane of this build queues for agents. An agent that lacks
// one of them cannot do all that may be asked of it; one that has all of them may be of any version.
package tasktypes

import (
	"slices"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// queued is never written after the process starts.
var queued = []commonv1.TaskType{
	commonv1.TaskType_TASK_TYPE_PROBE_NOOP, commonv1.TaskType_TASK_TYPE_WORKLOAD_DEPLOY,
	commonv1.TaskType_TASK_TYPE_WORKLOAD_START, commonv1.TaskType_TASK_TYPE_WORKLOAD_STOP,
	commonv1.TaskType_TASK_TYPE_WORKLOAD_RESTART, commonv1.TaskType_TASK_TYPE_WORKLOAD_REMOVE,
	commonv1.TaskType_TASK_TYPE_WORKLOAD_STATUS, commonv1.TaskType_TASK_TYPE_STORAGE_ALLOCATE,
	commonv1.TaskType_TASK_TYPE_STORAGE_RELEASE, commonv1.TaskType_TASK_TYPE_DIAGNOSTICS_COLLECT,
}

// Queued returns the types, in the order of the enum.
func Queued() []commonv1.TaskType { return slices.Sorted(slices.Values(queued)) }

// Lacking returns which of the types an agent lacks that has the given ones, in the order of the enum.
func Lacking(has []commonv1.TaskType) []commonv1.TaskType {
	return slices.DeleteFunc(Queued(), func(t commonv1.TaskType) bool { return slices.Contains(has, t) })
}
