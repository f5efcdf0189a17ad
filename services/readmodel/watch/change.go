package watch

import (
	"encoding/json"
	"math"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/services/readmodel/project"
)

// key names an object.
type key struct {
	topic readmodelv1.Topic
	id    string
}

// noPosition marks a change that no event made.
const noPosition = math.MaxInt64

// mark is what is known of a changed object before it is loaded.
type mark struct {
	pos     int64 // of the first change that has not been sent
	created bool
}

// item is one object as it is now, with what filters ask for.
type item struct {
	key     key
	message *readmodelv1.WatchItem

	tenantID, workspaceID, nodeID string
	created                       bool
	owners                        map[string]string // of the workspaces and nodes whose names the message shows: their tenants
}

// payload is what is needed of an event's body to know what changed.
type payload struct {
	NodeID      string `json:"node_id"`
	WorkspaceID string `json:"workspace_id"`
	RunID       string `json:"run_id"`
	InstanceID  string `json:"instance_id"`
	Task        *struct {
		TaskID string `json:"task_id"`
	} `json:"task"`
}

// changedBy answers the objects that an event changes. Beats change none: what follows from the time alone is found by looking.
func changedBy(r events.Record) []key {
	var p payload
	if err := json.Unmarshal(r.Payload, &p); err != nil {
		return nil // parked by the projection as well
	}
	one := func(topic readmodelv1.Topic, id string) []key {
		if id == "" {
			return nil
		}
		return []key{{topic: topic, id: id}}
	}
	switch r.Kind {
	case project.KindNode, project.KindGate, project.KindSession:
		return one(readmodelv1.Topic_TOPIC_NODES, p.NodeID)
	case project.KindWorkspace, project.KindObservation:
		return one(readmodelv1.Topic_TOPIC_WORKSPACES, p.WorkspaceID)
	case project.KindRun: // a workspace shows the step and the waiting of its run, and the attempts that changed with it come in its event
		var run lifecyclev1.Run
		if err := r.Decode(&run); err != nil {
			return nil
		}
		keys := append(one(readmodelv1.Topic_TOPIC_RUNS, p.RunID), one(readmodelv1.Topic_TOPIC_WORKSPACES, p.WorkspaceID)...)
		for _, a := range run.GetChangedSteps() {
			keys = append(keys, one(readmodelv1.Topic_TOPIC_STEPS, project.StepID(a))...)
		}
		return keys
	case project.KindStep: // and whether one stalls
		var a lifecyclev1.StepAttempt
		if err := r.Decode(&a); err != nil {
			return nil
		}
		return append(one(readmodelv1.Topic_TOPIC_STEPS, project.StepID(&a)), one(readmodelv1.Topic_TOPIC_WORKSPACES, p.WorkspaceID)...)
	case project.KindInstance:
		return one(readmodelv1.Topic_TOPIC_INSTANCES, p.InstanceID)
	case project.KindTask:
		if p.Task != nil {
			return one(readmodelv1.Topic_TOPIC_TASKS, p.Task.TaskID)
		}
	}
	return nil
}

// creates says whether the event is the first of the object itself.
func creates(r events.Record, k key) bool {
	if r.AggregateVersion != 1 {
		return false
	}
	switch k.topic { //nolint:exhaustive // there is no other
	case readmodelv1.Topic_TOPIC_NODES:
		return r.Kind == project.KindNode
	case readmodelv1.Topic_TOPIC_WORKSPACES:
		return r.Kind == project.KindWorkspace
	default:
		return true
	}
}

// add notes the changes of an event.
func add(marks map[key]mark, r events.Record) {
	for _, k := range changedBy(r) {
		m, ok := marks[k]
		if !ok || r.Pos < m.pos {
			m.pos = r.Pos
		}
		m.created = m.created || creates(r, k)
		marks[k] = m
	}
}

// stepRun is the run of a step's aggregate id.
func stepRun(id string) string {
	const uuidLength = 36
	if len(id) < uuidLength {
		return ""
	}
	return id[:uuidLength]
}
