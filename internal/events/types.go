package events

// typeOfKind is the full name of the message that events of a kind carry. If the event's message has that type,
// body_type is stored empty: the name is longer than most of the other columns in a row of a task or of a step. An
// entry must not change while events of its kind may be in a log; an event of the kind with another message is stored
// with that message's name.
var typeOfKind = map[string]string{
	"allocation.changed": "gpuaas.lifecycle.v1.Allocation",
	"claim.changed":      "gpuaas.lifecycle.v1.Claim",
	"gate.changed":       "gpuaas.lifecycle.v1.NodeGate",
	"instance.changed":   "gpuaas.lifecycle.v1.Instance",
	"run.changed":        "gpuaas.lifecycle.v1.Run",
	"session.changed":    "gpuaas.node.v1.SessionChanged",
	"step.changed":       "gpuaas.lifecycle.v1.StepAttempt",
	"task.changed":       "gpuaas.lifecycle.v1.TaskChanged",
	"workload.observed":  "gpuaas.node.v1.Observation",
	"workspace.changed":  "gpuaas.lifecycle.v1.Workspace",
}

// messageType returns the full name of the event's message; empty if it carries no message, or an empty one without a
// stored type.
func (r Record) messageType() string {
	if r.BodyType != "" || len(r.Body) == 0 {
		return r.BodyType
	}
	return typeOfKind[r.Kind]
}
