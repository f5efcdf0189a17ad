package meshstatus

import (
	"errors"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/service"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

func TestReportedIsWhatTheServiceSaysAndNoMore(t *testing.T) {
	now := time.Unix(1000, 0)
	early, late := timestamppb.New(time.Unix(100, 0)), timestamppb.New(time.Unix(500, 0))
	database := &commonv1.Part{
		Name: "database", State: commonv1.PartState_PART_STATE_OK, Since: early, ObservedAt: late,
		Required: true,
	}
	lost := &commonv1.Part{
		Name: "database", State: commonv1.PartState_PART_STATE_DOWN, Since: late, ObservedAt: late, Required: true,
		Reason: commonv1.Reason_REASON_UNAVAILABLE, Detail: "gone", NextAction: "start it",
	}
	store := &commonv1.Part{Name: "lock_store", State: commonv1.PartState_PART_STATE_OK, Since: early, ObservedAt: late}
	off := &commonv1.Part{
		Name: "lock_store", State: commonv1.PartState_PART_STATE_OFF, Since: early, ObservedAt: late,
		Detail: "none is configured",
	}
	down := &commonv1.Part{
		Name: "lock_store", State: commonv1.PartState_PART_STATE_DOWN, Since: late, ObservedAt: late,
		Reason: commonv1.Reason_REASON_UNAVAILABLE, Detail: "it is gone", NextAction: "start redis",
	}
	type row struct {
		name, state, reason string
		ok, advised         bool
		since               *timestamppb.Timestamp
	}
	for name, tc := range map[string]struct {
		parts []*commonv1.Part
		err   error
		want  [2]row
	}{
		"all is well": {
			parts: []*commonv1.Part{database, store}, want: [2]row{
				{"lifecycle", "ok", "", true, false, early}, {"lock_store", "ok", "", true, false, early},
			},
		},
		"none configured": {
			parts: []*commonv1.Part{database, off}, want: [2]row{
				{"lifecycle", "ok", "", true, false, early}, {"lock_store", "off", "", true, false, early},
			},
		},
		"the store is down, and the service is not": {parts: []*commonv1.Part{database, down}, want: [2]row{
			{"lifecycle", "ok", "", true, false, early}, {"lock_store", "down", "unavailable", false, true, late},
		}},
		"the service lacks what it needs": {parts: []*commonv1.Part{lost, store}, want: [2]row{
			{"lifecycle", "down", "unavailable", false, true, late}, {"lock_store", "ok", "", true, false, early},
		}},
		"silence is no evidence against the store": {err: errors.New("dial"), want: [2]row{
			{"lifecycle", "down", "unavailable", false, true, nil}, {"lock_store", "unknown", "unavailable", false, true, nil},
		}},
		"an older service does not speak of it": {parts: []*commonv1.Part{database}, want: [2]row{
			{"lifecycle", "ok", "", true, false, early}, {"lock_store", "unknown", "", false, true, nil},
		}},
	} {
		rows := reported(Probe{Name: "lifecycle", Parts: []string{"lock_store"}},
			&commonv1.GetHealthResponse{Parts: tc.parts}, tc.err, now)
		if len(rows) != 2 {
			t.Fatalf("%s: %d rows", name, len(rows))
		}
		for i, c := range rows {
			got := row{c.GetName(), names.Of(c.GetState()), c.GetReason(), c.GetOk(), c.GetNextAction() != "", c.GetSince()}
			want := tc.want[i]
			if !got.since.AsTime().Equal(want.since.AsTime()) {
				t.Errorf("%s: %s since %v, want %v", name, c.GetName(), got.since, want.since)
			}
			got.since, want.since = nil, nil
			if got != want {
				t.Errorf("%s: got %+v, want %+v", name, got, want)
			}
			if c.GetDetail() == "" || c.GetObservedAt() == nil {
				t.Errorf("%s: %s has no detail, or was never looked at: %v", name, c.GetName(), c)
			}
		}
	}
}

// TestANodeAPIThatDoesNotBeatHasANextAction: like each part that is down, with a reason and a severity.
func TestANodeAPIThatDoesNotBeatHasANextAction(t *testing.T) {
	now := time.Unix(1000, 0)
	silent := view.Replica{BeatAt: time.Unix(900, 0)}
	if c := nodeAPI([]view.Replica{silent}, now); c.GetOk() || c.GetReason() != "unavailable" ||
		c.GetSeverity() != commonv1.Severity_SEVERITY_P1 || c.GetNextAction() == "" {
		t.Errorf("%v", c)
	}
	beats := view.Replica{BeatAt: time.Unix(999, 0), Fresh: true}
	if c := nodeAPI([]view.Replica{silent, beats}, now); !c.GetOk() || c.GetReason()+c.GetNextAction() != "" {
		t.Errorf("%v", c)
	}
}

func TestADatabaseWithoutRoomIsDownAtP0(t *testing.T) {
	now := time.Unix(1000, 0)
	room := func(state commonv1.PartState) *readmodelv1.ComponentStatus {
		return &readmodelv1.ComponentStatus{
			Name: service.PartDatabaseRoom, State: state, Ok: state == commonv1.PartState_PART_STATE_OK, Detail: "no disk space",
			Reason: "unavailable", NextAction: "free space", Since: timestamppb.New(now),
		}
	}
	for name, tt := range map[string]struct {
		said []*readmodelv1.ComponentStatus
		down bool
	}{
		"all have room": {
			[]*readmodelv1.ComponentStatus{
				room(commonv1.PartState_PART_STATE_OK), room(commonv1.PartState_PART_STATE_OK),
			}, false,
		},
		"one was refused": {
			[]*readmodelv1.ComponentStatus{
				room(commonv1.PartState_PART_STATE_OK), room(commonv1.PartState_PART_STATE_DOWN),
			}, true,
		},
		"silence is no evidence":   {[]*readmodelv1.ComponentStatus{room(commonv1.PartState_PART_STATE_UNKNOWN)}, false},
		"an older service says no": {nil, false},
	} {
		components := withRoom(append([]*readmodelv1.ComponentStatus{component("database", true, "era 0", now)}, tt.said...))
		if len(components) != 1 {
			t.Fatalf("%s: %d components", name, len(components))
		}
		got := components[0]
		if got.GetOk() == tt.down || (got.GetSeverity() == commonv1.Severity_SEVERITY_P0) != tt.down {
			t.Errorf("%s: %v", name, got)
		}
		if tt.down && (got.GetNextAction() != "free space" || got.GetDetail() != "no disk space" ||
			got.GetState() != commonv1.PartState_PART_STATE_DOWN) {
			t.Errorf("%s: %v", name, got)
		}
	}
}
