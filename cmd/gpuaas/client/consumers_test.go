package client_test

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

func TestEventsConsumers(t *testing.T) {
	f := mesh(t)
	gone := &readmodelv1.EventConsumer{Consumer: "lifecycle/gone", Position: 7, Behind: 40, Parked: 2, MovedAt: at(1)}
	always(f, "ListConsumers", &readmodelv1.ListConsumersResponse{Items: []*readmodelv1.EventConsumer{
		gone,
		{Consumer: "readmodel/projections", Position: 47, Replicas: 2, MovedAt: at(2)},
		{Consumer: "recovery/watchdog", Position: 47, UnknownReplicas: 1, MovedAt: at(2)},
	}})
	golden(t, "consumers.golden", call(t, "events", "consumers").wants(t, 0).out)
	var asked []*readmodelv1.ForgetConsumerRequest
	answer(f, "ForgetConsumer", func(req *readmodelv1.ForgetConsumerRequest) (*readmodelv1.ForgetConsumerResponse, error) {
		asked = append(asked, req)
		switch req.GetConsumer() {
		case gone.GetConsumer():
			return &readmodelv1.ForgetConsumerResponse{Consumer: gone}, nil
		case "lifecycle/much":
			return &readmodelv1.ForgetConsumerResponse{Consumer: gone, ParkedLeft: true}, nil
		case "readmodel/projections":
			return nil, fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "a live replica runs it")
		}
		return &readmodelv1.ForgetConsumerResponse{}, nil
	})
	if got := call(t, "events", "forget", "lifecycle/gone", "--reason", "r", "--yes").wants(t,
		0); !strings.Contains(got.err, "lifecycle/gone is forgotten") {
		t.Errorf("it says %q", got.err)
	}
	if got := call(t, "events", "forget", "lifecycle/gone", "--reason", "r", "--dry-run").wants(t,
		0); !strings.Contains(got.err, "nothing was changed") {
		t.Errorf("a dry run says %q", got.err)
	}
	if got := call(t, "events", "forget", "lifecycle/never", "--reason", "r", "--yes").wants(t,
		0); !strings.Contains(got.err, "there is no consumer") {
		t.Errorf("of one that is not there it says %q", got.err)
	}
	if got := call(t, "events", "forget", "lifecycle/much", "--reason", "r", "--yes").wants(t,
		0); !strings.Contains(got.err, "parked is left: run") {
		t.Errorf("of one that has parked much it says %q", got.err)
	}
	call(t, "events", "forget", "readmodel/projections", "--reason", "r", "--yes").wants(t, 5)
	call(t, "events", "forget", "lifecycle/gone", "--yes").wants(t, 2)
	if !asked[len(asked)-1].GetDryRun() && asked[0].GetReason() != "r" {
		t.Errorf("asked %v", asked)
	}
}

// Scenario: a replay is waited for. What was applied is no longer listed, what could not be applied is printed with its
// error, and a consumer that has not tried in time is named.
func TestEventsParked(t *testing.T) {
	f := mesh(t)
	parked := &readmodelv1.ParkedEvent{
		Consumer: "lifecycle/sessions", Position: 7, Kind: "node.changed", Error: "no node of this id", Attempts: 3,
		ParkedAt: at(1),
	}
	always(f, "ListParked", &readmodelv1.ListParkedResponse{Items: []*readmodelv1.ParkedEvent{parked}})
	golden(t, "parked.golden", call(t, "events", "parked").wants(t, 0).out)
	golden(t, "parked.golden", call(t, "events", "parked", "lifecycle/sessions").wants(t, 0).out)

	tried := 0
	always(f, "ReplayParked", &readmodelv1.ReplayParkedResponse{Asked: 1})
	answer(f, "ListParked", func(req *readmodelv1.ListParkedRequest) (*readmodelv1.ListParkedResponse, error) {
		switch tried++; tried {
		case 1:
			asked := proto.CloneOf(parked)
			asked.AskedAt = at(2)
			return &readmodelv1.ListParkedResponse{Items: []*readmodelv1.ParkedEvent{asked}}, nil
		case 2:
			after := &readmodelv1.ParkedEvent{Consumer: "lifecycle/sessions", Position: 8, AskedAt: at(2)}
			return &readmodelv1.ListParkedResponse{Items: []*readmodelv1.ParkedEvent{after}}, nil
		}
		return &readmodelv1.ListParkedResponse{Items: []*readmodelv1.ParkedEvent{parked}}, nil
	})
	got := call(t, "events", "replay", "lifecycle/sessions", "7", "--reason", "r").wants(t, 0)
	if tried != 2 || !strings.Contains(got.err, "has applied what was asked for") {
		t.Errorf("after %d looks it says %q", tried, got.err)
	}
	got = call(t, "events", "replay", "lifecycle/sessions", "--all", "--reason", "r").wants(t, 5)
	if !strings.Contains(got.out, "no node of this id") || !strings.Contains(got.err, "still has 1 events parked") {
		t.Errorf("of what stays parked it says %q, %q", got.out, got.err)
	}
	parked.AskedAt = at(2)
	got = call(t, "events", "replay", "lifecycle/sessions", "7", "--reason", "r", "--timeout", "0s").wants(t, 6)
	if !strings.Contains(got.err, "has not tried 1 events yet") {
		t.Errorf("of a consumer that has not tried it says %q", got.err)
	}
	for _, wrong := range [][]string{
		{"replay", "lifecycle/sessions", "--reason", "r"},
		{"replay", "lifecycle/sessions", "7", "--all", "--reason", "r"},
		{"replay", "lifecycle/sessions", "x", "--reason", "r"},
		{"replay", "lifecycle/sessions", "7"},
		{"drop", "lifecycle/sessions", "0", "--reason", "r", "--yes"},
		{"drop", "lifecycle/sessions", "7", "--yes"},
	} {
		call(t, append([]string{"events"}, wrong...)...).wants(t, 2)
	}
}
