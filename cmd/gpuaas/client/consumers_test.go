package client_test

import (
	"strings"
	"testing"

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
