package report

import (
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// typeRefused is the reason of a task that its agent does not know how to do.
var typeRefused = names.Of(commonv1.Reason_REASON_TASK_TYPE_UNSUPPORTED)

// refusedType returns the event that work was refused for the agent's version, which recovery judges the node by.
func refusedType(r task.Row) events.Event {
	kind := aside.Value[commonv1.TaskType]("task", r.TaskID, r.Type)
	return events.Event{
		Kind: "task.type_refused", AggregateType: "task_refusal", AggregateID: r.TaskID, AggregateVersion: r.Version,
		Payload: &lifecyclev1.TaskTypeRefused{RefusedTaskId: r.TaskID, RefusedByNodeId: r.NodeID, Type: kind},
		Correlation: events.Correlation{
			CorrelationID: r.CorrelationID, NodeID: r.NodeID, TaskID: r.TaskID, WorkspaceID: r.WorkspaceID,
		},
	}
}
