package events

// typeOfKind is the full name of the message that events of a kind carry. Where it is the event's, body_type is stored empty: the name is longer than
// most of what a row of a task or of a step holds beside it. A kind stays as it is for as long as events of it may be in a log; one that comes to carry
// another message is stored with its name.
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

// messageType returns the full name of the event's message; empty if it carries none that says anything.
func (r Record) messageType() string {
	if r.BodyType != "" || len(r.Body) == 0 {
		return r.BodyType
	}
	return typeOfKind[r.Kind]
}
