package events_test

import (
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestTypesOfKindsExist(t *testing.T) {
	t.Parallel()
	for kind, name := range events.TypeOfKind {
		if _, err := protoregistry.GlobalTypes.FindMessageByName(protoreflect.FullName(name)); err != nil {
			t.Errorf("%s: %v", kind, err)
		}
	}
}

// TestWhatAKindSaysIsNotStored: the rows of a task's events have neither the name of their message nor the task's id a
// second time, and are read completely.
func TestWhatAKindSaysIsNotStored(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	ctx := testkit.Context(t)
	pool := db.Pool(pg.RoleLifecycle)
	taskID, nodeID := ids.New(), ids.New()
	of := func(version int64) events.Event {
		return events.Event{
			Kind: "task.changed", AggregateType: "task", AggregateID: taskID, AggregateVersion: version,
			Payload:     &lifecyclev1.TaskChanged{Task: &lifecyclev1.Task{TaskId: taskID, NodeId: nodeID, Version: version}},
			Correlation: events.Correlation{TaskID: taskID, NodeID: nodeID},
		}
	}
	other := of(4)
	other.Payload = &lifecyclev1.Task{TaskId: taskID, NodeId: nodeID, Version: 4} // not the message that the kind implies
	for _, list := range [][]events.Event{{of(1)}, {of(2), of(3)}, {other}} {
		tx, err := pool.Begin(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := events.Append(ctx, tx, list...); err != nil {
			t.Fatal(err)
		}
		if err := tx.Commit(ctx); err != nil {
			t.Fatal(err)
		}
	}
	var repeated int
	if err := pool.QueryRow(ctx, `SELECT count(*) FROM events.event
		WHERE body_type <> '' OR task_id IS NOT NULL OR task_uuid IS NOT NULL`).Scan(&repeated); err != nil {
		t.Fatal(err)
	}
	if repeated != 1 {
		t.Errorf("%d rows repeat what their kind and aggregate say", repeated)
	}
	list := testkit.Events(t, pool, `aggregate_id = $1`, taskID)
	for i, e := range list {
		if e.TaskID != taskID || e.NodeID != nodeID {
			t.Errorf("read %+v", e.Correlation)
		}
		if i == len(list)-1 {
			var task lifecyclev1.Task
			if err := e.Decode(&task); err != nil || !proto.Equal(&task, other.Payload) {
				t.Errorf("read %v, %v", &task, err)
			}
			break
		}
		var changed lifecyclev1.TaskChanged
		if err := e.Decode(&changed); err != nil || changed.GetTask().GetTaskId() != taskID ||
			changed.GetTask().GetVersion() != int64(i+1) {
			t.Errorf("read %v, %v", &changed, err)
		}
		if err := e.Decode(&lifecyclev1.Run{}); err == nil {
			t.Error("a task is read as a run")
		}
		if e.Text("task", "task_id") != taskID && e.Text("task", "taskId") != taskID {
			t.Errorf("shown %v", e.Message)
		}
	}
	if len(list) != 4 {
		t.Errorf("read %d events", len(list))
	}
}
