package bounds

import (
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// TestTimesOutOfRangeAreRemoved: services store what agents report as JSON, many nodes in one transaction. A time that
// JSON cannot express is removed wherever it stands; any other stays.
func TestTimesOutOfRangeAreRemoved(t *testing.T) {
	frames := func(at *timestamppb.Timestamp) map[string]*nodev1.ConnectRequest {
		host := &commonv1.HostFacts{Kernel: "6.1", StateDisk: &commonv1.StateDisk{Full: true, Since: at}}
		return map[string]*nodev1.ConnectRequest{
			"Hello": {Frame: &nodev1.ConnectRequest_Hello{Hello: &nodev1.Hello{Host: host}}},
			"Heartbeat": {Frame: &nodev1.ConnectRequest_Heartbeat{
				Heartbeat: &nodev1.Heartbeat{WallClock: at, ChangedFacts: host},
			}},
			"Observation": {Frame: &nodev1.ConnectRequest_Observation{Observation: &nodev1.Observation{
				ObservedAt: at, Workloads: []*nodev1.WorkloadStatus{{Name: "w", StartedAt: at, ExitedAt: at}},
			}}},
			"TaskStarted": {Frame: &nodev1.ConnectRequest_TaskStarted{TaskStarted: &nodev1.TaskStarted{StartedAt: at}}},
			"TaskResult": {Frame: &nodev1.ConnectRequest_TaskResult{
				TaskResult: &nodev1.TaskResult{StartedAt: at, FinishedAt: at},
			}},
		}
	}
	hostile := []*timestamppb.Timestamp{{Seconds: 1 << 60}, {Seconds: -1 << 60}, {Nanos: -1}, {Nanos: 1 << 30}}
	for _, at := range hostile {
		removed := frames(nil)
		for name, frame := range frames(at) {
			Reported(frame, time.Now())
			if _, err := protojson.Marshal(frame); err != nil || !proto.Equal(frame, removed[name]) {
				t.Errorf("%s with %v became %v: %v", name, at, frame, err)
			}
		}
	}
	sound := frames(timestamppb.Now())
	for name, frame := range sound {
		was := proto.CloneOf(frame)
		if Reported(frame, time.Now()); !proto.Equal(frame, was) {
			t.Errorf("a sound %s became %v", name, frame)
		}
	}
	// What is removed of a record is counted.
	record := &nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_Diagnostic{Diagnostic: &nodev1.DiagnosticReport{
		Diagnostics: []*commonv1.Diagnostic{{Code: 6, ObservedAt: hostile[0]}},
	}}}
	if got := Reported(record, time.Now()); got != (Cut{Time: 1}) {
		t.Errorf("cut %+v", got)
	}
}
