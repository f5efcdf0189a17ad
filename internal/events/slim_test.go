package events_test

import (
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	"pgregory.net/rapid"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
)

// TestSlimBodiesReadAsTheyWereWritten: a body is read as it was written whatever ids a message and its event have,
// equal, different or missing, in the message and in its lists.
func TestSlimBodiesReadAsTheyWereWritten(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		id := rapid.SampledFrom([]string{"", "a", "b", "0193d1c8-0000-7000-8000-000000000001"})
		draw := func(name string) string { return id.Draw(t, name) }
		c := events.Correlation{
			CorrelationID: draw("correlation"), TenantID: draw("tenant"), WorkspaceID: draw("workspace"),
			WorkflowID: draw("workflow"), TaskID: draw("task"), NodeID: draw("node"), NodeInstanceID: draw("instance"),
		}
		run := &lifecyclev1.Run{
			RunId: draw("run"), TenantId: draw("of tenant"), WorkspaceId: draw("of workspace"),
			CorrelationId: draw("of correlation"), Step: rapid.Int32().Draw(t, "step"), StepNames: []string{"a", ""},
			CreatedAt: timestamppb.Now(),
		}
		for range rapid.IntRange(0, 3).Draw(t, "attempts") {
			run.ChangedSteps = append(run.ChangedSteps, &lifecyclev1.StepAttempt{
				RunId: draw("run of attempt"), WorkspaceId: draw("workspace of attempt"), Name: draw("name"),
				State: commonv1.AttemptState_ATTEMPT_STATE_RUNNING,
			})
		}
		for _, m := range []proto.Message{
			run, &lifecyclev1.Run{}, &nodev1.Observation{WorkspaceId: draw("observed")},
			&lifecyclev1.Workspace{WorkspaceId: draw("own"), TenantId: draw("owner"), NodeId: draw("on")},
		} {
			before := proto.Clone(m)
			body, name, err := events.Stored(events.Event{Kind: "k", Payload: m, Correlation: c})
			if err != nil {
				t.Fatal(err)
			}
			if !proto.Equal(m, before) {
				t.Fatalf("the message was changed: %v, was %v", m, before)
			}
			got := m.ProtoReflect().New().Interface()
			if err := (events.Record{Body: body, BodyType: name, Correlation: c}).Decode(got); err != nil {
				t.Fatal(err)
			}
			if !proto.Equal(got, m) {
				t.Fatalf("read %v, written %v", got, m)
			}
		}
	})
}

// TestSlimBodiesLeaveOutTheIds: ids that the columns of an event have are not stored again in each of its attempts.
func TestSlimBodiesLeaveOutTheIds(t *testing.T) {
	t.Parallel()
	c := events.Correlation{CorrelationID: ids.New(), TenantID: ids.New(), WorkspaceID: ids.New(), WorkflowID: ids.New()}
	run := &lifecyclev1.Run{
		RunId: c.WorkflowID, TenantId: c.TenantID, WorkspaceId: c.WorkspaceID,
		CorrelationId: c.CorrelationID, Step: 3,
	}
	for range 2 {
		run.ChangedSteps = append(run.ChangedSteps,
			&lifecyclev1.StepAttempt{RunId: c.WorkflowID, WorkspaceId: c.WorkspaceID, Name: "allocate"})
	}
	body, _, err := events.Stored(events.Event{Kind: "run.changed", Payload: run, Correlation: c})
	if err != nil {
		t.Fatal(err)
	}
	if whole := proto.Size(run); len(body) > whole-8*36 {
		t.Errorf("%d bytes are stored of %d, and eight ids of 36 are in the columns", len(body), whole)
	}
}

// TestSlimBodiesOfNoUseAreRefused: reading a body that is truncated or is no message is an error, and never returns a
// message.
func TestSlimBodiesOfNoUseAreRefused(t *testing.T) {
	t.Parallel()
	for _, body := range [][]byte{{0}, {0, 1, 0xff}} {
		r := events.Record{Kind: "run.changed", Body: body, BodyType: "gpuaas.lifecycle.v1.Run"}
		if err := r.Decode(&lifecyclev1.Run{}); err == nil {
			t.Errorf("%x was read", body)
		}
	}
}
