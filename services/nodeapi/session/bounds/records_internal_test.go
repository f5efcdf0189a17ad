package bounds

import (
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// A hostile record is bounded and clean before it is stored; a sound one stays as it is.
func TestRecordsAreBoundedAndClean(t *testing.T) {
	sound := &commonv1.Diagnostic{
		Code: 6, Detail: "429 from the edge", ObservedAt: timestamppb.Now(), FirstSeenAt: timestamppb.Now(), Count: 3,
		NextRetry: durationpb.New(time.Minute), RetryCorrelationId: "c", DedupeKeyHash: "h",
	}
	was := proto.CloneOf(sound)
	hostile := &commonv1.Diagnostic{
		Code: 9999, Detail: strings.Repeat("\x1b[31m\n\u202eé", 1000), ObservedAt: &timestamppb.Timestamp{Seconds: 1 << 60},
		EndedAt: &timestamppb.Timestamp{Nanos: -1}, Count: -5, NextRetry: &durationpb.Duration{Seconds: 1 << 40},
		RetryCorrelationId: strings.Repeat("x", 1000), DedupeKeyHash: strings.Repeat("\xc3\xa9", 1000),
	}
	early := &commonv1.Diagnostic{Code: 6, ObservedAt: timestamppb.New(time.Now().Add(time.Hour))}
	if got := Records([]*commonv1.Diagnostic{sound, hostile, early}, time.Now()); got != (Cut{Size: 1, Time: 2}) {
		t.Errorf("cut %+v", got)
	}
	if !proto.Equal(was, sound) {
		t.Errorf("a sound record became %v", sound)
	}
	if len(hostile.GetDetail()) > 512 || !utf8.ValidString(hostile.GetDetail()) ||
		strings.ContainsAny(hostile.GetDetail(), "\x1b\n\u202e") || hostile.GetObservedAt() != nil ||
		hostile.GetEndedAt() != nil || hostile.GetCount() != 1 || hostile.GetNextRetry().AsDuration() > 24*time.Hour ||
		len(hostile.GetRetryCorrelationId()) > 64 || len(hostile.GetDedupeKeyHash()) > 64 || hostile.GetCode() != 9999 {
		t.Errorf("%v", hostile)
	}
}
