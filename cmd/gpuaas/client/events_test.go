package client_test

import (
	"testing"

	"google.golang.org/protobuf/types/known/structpb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

func TestEventsShow(t *testing.T) {
	f := mesh(t)
	body, err := structpb.NewStruct(map[string]any{
		"run_id": "r1", "state": "RUN_STATE_RUNNING",
		"changed_steps": []any{map[string]any{"name": "a <step>"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	rows := []*readmodelv1.EventRow{
		{
			Position: 7, Source: "lifecycle", Kind: "run.changed", AggregateType: "run", AggregateId: "r1", AggregateVersion: 3,
			At: at(1), WorkflowId: "r1", Body: body,
		},
		{
			Position: 8, Source: "lifecycle", Kind: "node.changed", AggregateId: "n1", AggregateVersion: 1, At: at(2),
			Withheld: "an earlier build has stored it as JSON",
		},
	}
	var asked *readmodelv1.ListEventsRequest
	answer(f, "ListEvents", func(req *readmodelv1.ListEventsRequest) (*readmodelv1.ListEventsResponse, error) {
		asked = req
		switch req.GetPosition() {
		case 0:
			return &readmodelv1.ListEventsResponse{Items: rows}, nil
		case 7:
			return &readmodelv1.ListEventsResponse{Items: rows[:1]}, nil
		}
		return nil, fault.New(commonv1.Reason_REASON_NOT_FOUND, "there is no event at position 9")
	})
	golden(t, "event.golden", call(t, "events", "show", "7").wants(t, 0).out)
	golden(t, "events.golden", call(t, "events", "show", "--since", "7", "--type", "run.changed").wants(t, 0).out)
	if asked.GetSince() != 7 || asked.GetKind() != "run.changed" {
		t.Errorf("asked %v", asked)
	}
	if got := call(t, "events", "show", "--since", "7", "-o", "json", "--jq",
		".items[0].body.changed_steps[0].name").wants(t, 0); got.out != "a <step>\n" {
		t.Errorf("by jq: %q", got.out)
	}
	call(t, "events", "show", "9").wants(t, 3)
	for _, args := range [][]string{{}, {"x"}, {"0"}, {"7", "--since", "3"}, {"7", "--type", "run.changed"}, {"1", "2"}} {
		call(t, append([]string{"events", "show"}, args...)...).wants(t, 2)
	}
}
