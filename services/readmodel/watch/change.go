package watch

import (
	"context"
	"math"

	"google.golang.org/protobuf/proto"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/project"
)

// key names an object.
type key struct {
	topic readmodelv1.Topic
	id    string
}

// noPosition marks a change that no event made.
const noPosition = math.MaxInt64

// mark is the state of a changed object that is not loaded yet.
type mark struct {
	pos     int64 // of the first change that has not been sent
	created bool
}

// item is one object as it is now, with the ids by which filters select it.
type item struct {
	key     key
	message *readmodelv1.WatchItem

	tenantID, workspaceID, nodeID string
	created                       bool
	// of the workspaces and nodes whose names the message shows: their tenants
	owners map[string]string
}

// changedBy returns the objects that an event changes. Beats change none: a scan finds the changes that follow from the
// time alone. An event that cannot be decoded changes none either, because the projection parks it as well.
func changedBy(r events.Record) []key {
	one := func(topic readmodelv1.Topic, id string) []key {
		if id == "" {
			return nil
		}
		return []key{{topic: topic, id: id}}
	}
	switch r.Kind {
	case project.KindNode:
		return one(readmodelv1.Topic_TOPIC_NODES, read(r, &recoveryv1.NodeIdentity{}).GetNodeId())
	case project.KindGate:
		return one(readmodelv1.Topic_TOPIC_NODES, read(r, &lifecyclev1.NodeGate{}).GetNodeId())
	case project.KindSession:
		return one(readmodelv1.Topic_TOPIC_NODES, read(r, &nodev1.SessionChanged{}).GetNodeId())
	case project.KindVerdict:
		return one(readmodelv1.Topic_TOPIC_NODES, read(r, &recoveryv1.NodeVerdict{}).GetNodeId())
	case project.KindWorkspace:
		return one(readmodelv1.Topic_TOPIC_WORKSPACES, read(r, &lifecyclev1.Workspace{}).GetWorkspaceId())
	case project.KindObservation:
		return one(readmodelv1.Topic_TOPIC_WORKSPACES, read(r, &nodev1.Observation{}).GetWorkspaceId())
	// a workspace shows its run's step and what it waits for, and the run's event carries the attempts that changed with
	// it
	case project.KindRun:
		run := read(r, &lifecyclev1.Run{})
		keys := append(one(readmodelv1.Topic_TOPIC_RUNS, run.GetRunId()),
			one(readmodelv1.Topic_TOPIC_WORKSPACES, run.GetWorkspaceId())...)
		for _, a := range run.GetChangedSteps() {
			keys = append(keys, one(readmodelv1.Topic_TOPIC_STEPS, project.StepID(a))...)
		}
		return keys
	case project.KindStep: // a workspace also shows whether a step stalls
		a := read(r, &lifecyclev1.StepAttempt{})
		if a == nil {
			return nil
		}
		return append(one(readmodelv1.Topic_TOPIC_STEPS, project.StepID(a)),
			one(readmodelv1.Topic_TOPIC_WORKSPACES, a.GetWorkspaceId())...)
	case project.KindInstance:
		return one(readmodelv1.Topic_TOPIC_INSTANCES, read(r, &lifecyclev1.Instance{}).GetInstanceId())
	case project.KindTask:
		return one(readmodelv1.Topic_TOPIC_TASKS, read(r, &lifecyclev1.TaskChanged{}).GetTask().GetTaskId())
	}
	return nil
}

// read decodes the message of an event; it returns nil if the event cannot be decoded.
func read[T any, M interface {
	*T
	proto.Message
}](r events.Record, m M) M {
	if err := r.Decode(m); err != nil {
		return nil
	}
	return m
}

// creates reports whether the event is the first event of the object itself.
func creates(r events.Record, k key) bool {
	if r.AggregateVersion != 1 {
		return false
	}
	switch k.topic { // there is no other
	case readmodelv1.Topic_TOPIC_NODES:
		return r.Kind == project.KindNode
	case readmodelv1.Topic_TOPIC_WORKSPACES:
		return r.Kind == project.KindWorkspace
	default:
		return true
	}
}

// add adds the objects that an event changes to marks.
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

// watched returns the kinds of events that are read for watchers.
func watched() []string { return append(project.Kinds(), project.KindReplayed, project.KindRebuilt) }

// replayed returns the event that was parked and that r says was applied, at the position of r: until then it had
// changed nothing. If that event was cut since, it returns r, which changes no object.
func replayed(ctx context.Context, q pg.Querier, r events.Record) (events.Record, error) {
	parked, err := events.At(ctx, q, r.AggregateVersion)
	switch {
	case pg.IsNoRows(err):
		return r, nil
	case err != nil:
		return r, err
	}
	parked.Pos = r.Pos
	return parked, nil
}

// stepRun returns the run id in a step's aggregate id.
func stepRun(id string) string {
	const uuidLength = 36
	if len(id) < uuidLength {
		return ""
	}
	return id[:uuidLength]
}
