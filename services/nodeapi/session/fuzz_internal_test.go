package session

import (
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"buf.build/go/protovalidate"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/services/nodeapi/roster"
	"github.com/gpuaas/mesh/services/nodeapi/session/bounds"
)

// seedFrames returns a frame of each kind that an agent sends, and some that none should.
func seedFrames() []*nodev1.ConnectRequest {
	task := &nodev1.TaskRef{TaskId: ids.New(), Attempt: 1}
	far := &timestamppb.Timestamp{Seconds: 1 << 60, Nanos: -1}
	diagnostic := &commonv1.Diagnostic{
		Code: 6, Detail: "429 from the edge", ObservedAt: timestamppb.New(time.Unix(1e9, 0)), Count: 3,
		NextRetry: durationpb.New(time.Minute), RetryCorrelationId: ids.New(), DedupeKeyHash: "h",
	}
	hostile := &commonv1.Diagnostic{
		Code: 9999, Detail: "\x00\x1b[31m\n\u202e" + strings.Repeat("é", 1000), ObservedAt: far, EndedAt: far,
		FirstSeenAt: far, Count: -5, NextRetry: &durationpb.Duration{Seconds: -1 << 40, Nanos: 1},
	}
	facts := &commonv1.HostFacts{
		Hostname: "h\x00", Kernel: "6.1", Gpus: []*commonv1.Gpu{{DeviceId: "gpu-0", Index: -1}},
		Addresses: []string{"192.0.2.1", "\x00"},
		StateDisk: &commonv1.StateDisk{Full: true, FreeBytes: -1, Since: far},
	}
	hello := &nodev1.Hello{
		NodeId: ids.New(), NodeInstanceId: ids.New(), LedgerId: ids.New(), BootId: "b", AgentVersion: "dev", Host: facts,
		Profile:     &commonv1.ProfileFacts{Fingerprint: strings.Repeat("f", 500), ApiHost: "a:1\n\x1b"},
		Diagnostics: []*commonv1.Diagnostic{diagnostic, hostile},
		Recovery:    &commonv1.RecoveryCounters{Attempts: -1, LastOutcome: "\x1b]0;", LastAttemptAt: far},
	}
	return []*nodev1.ConnectRequest{
		{},
		{Frame: &nodev1.ConnectRequest_Hello{Hello: hello}},
		{Frame: &nodev1.ConnectRequest_Ready{Ready: &nodev1.Ready{}}},
		{Frame: &nodev1.ConnectRequest_ChallengeAnswer{ChallengeAnswer: &nodev1.ChallengeAnswer{Nonce: []byte("n")}}},
		{Frame: &nodev1.ConnectRequest_Heartbeat{Heartbeat: &nodev1.Heartbeat{Sequence: 1}}},
		{Frame: &nodev1.ConnectRequest_Heartbeat{Heartbeat: &nodev1.Heartbeat{Sequence: -1, ChangedFacts: facts}}},
		{Frame: &nodev1.ConnectRequest_TaskDelivered{TaskDelivered: &nodev1.TaskDelivered{Tasks: []*nodev1.TaskRef{task}}}},
		{Frame: &nodev1.ConnectRequest_TaskStarted{TaskStarted: &nodev1.TaskStarted{Task: task, StartedAt: far}}},
		{Frame: &nodev1.ConnectRequest_TaskProgress{TaskProgress: &nodev1.TaskProgress{Task: task, Note: "n\x00", Done: -1}}},
		{Frame: &nodev1.ConnectRequest_TaskResult{TaskResult: &nodev1.TaskResult{Task: task, State: 9999, Error: "\x00"}}},
		{Frame: &nodev1.ConnectRequest_Observation{Observation: &nodev1.Observation{}}},
		{Frame: &nodev1.ConnectRequest_Observation{Observation: &nodev1.Observation{
			WorkspaceId: ids.New(), ObservedAt: far, Workloads: []*nodev1.WorkloadStatus{{Name: "w", StartedAt: far}},
		}}},
		{Frame: &nodev1.ConnectRequest_Diagnostic{Diagnostic: &nodev1.DiagnosticReport{
			Diagnostics: []*commonv1.Diagnostic{hostile, diagnostic, hostile},
		}}},
		{Frame: &nodev1.ConnectRequest_RenewRequest{RenewRequest: &nodev1.RenewRequest{RequestId: "r"}}},
		{Frame: &nodev1.ConnectRequest_Goodbye{Goodbye: &nodev1.Goodbye{Reason: "the agent ends\x00"}}},
		{Frame: &nodev1.ConnectRequest_CertificateStored{CertificateStored: &nodev1.CertificateStored{}}},
		{Frame: &nodev1.ConnectRequest_OutputChunk{OutputChunk: &nodev1.OutputChunk{RequestId: "r"}}},
		{Frame: &nodev1.ConnectRequest_TaskKeysHeld{TaskKeysHeld: &nodev1.TaskKeysHeld{KeyIds: []string{"k"}}}},
		{Frame: &nodev1.ConnectRequest_ProfileAnswer{ProfileAnswer: &nodev1.ProfileAnswer{}}},
	}
}

// FuzzFrame has no frame taken but valid ones, whose texts can be stored, whose claims are bounded, and which a second
// check leaves as they are. A refusal is typed.
func FuzzFrame(f *testing.F) {
	for _, frame := range seedFrames() {
		data, err := proto.Marshal(frame)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	validator, err := protovalidate.New(protovalidate.WithMessages(&nodev1.ConnectRequest{}))
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		frame := &nodev1.ConnectRequest{}
		if proto.Unmarshal(data, frame) != nil {
			return
		}
		if _, err := checked(validator, frame, time.Now()); err != nil {
			if !fault.Has(err, commonv1.Reason_REASON_INVALID_ARGUMENT) {
				t.Fatal(err)
			}
			return
		}
		texts(t, frame.ProtoReflect())
		beat := frame.GetHeartbeat() != nil && frame.GetHeartbeat().GetChangedFacts() == nil // it is not stored
		if _, err := protojson.Marshal(frame); err != nil && !beat {
			t.Fatalf("%v cannot be stored: %v", frame, err)
		}
		var waiting diagnosed
		hello := frame.GetHello()
		for _, list := range [][]*commonv1.Diagnostic{hello.GetDiagnostics(), frame.GetDiagnostic().GetDiagnostics()} {
			for _, d := range list {
				bounded(t, d)
			}
			if got := waiting.take(list, time.Unix(1e9, 0)); len(got) > len(list) {
				t.Fatalf("%d diagnostics of %d", len(got), len(list))
			}
		}
		var host hostChanges
		host.reported(hello.GetHost())
		_ = host.take(frame.GetHeartbeat().GetChangedFacts(), time.Unix(1e9, 0))
		if p := boundedProfile(hello.GetProfile()); len(p.GetFingerprint()) > mostFingerprint ||
			len(p.GetApiHost()) > mostProfileText || strings.ContainsAny(p.GetApiHost(), "\n\x1b") {
			t.Fatalf("profile %v", p)
		}
		if c := bounds.Recovery(hello.GetRecovery()); c.GetAttempts() < 0 || len(c.GetLastOutcome()) > 64 ||
			strings.ContainsAny(c.GetLastOutcome(), "\n\x1b") || c.GetLastAttemptAt() != nil && !c.GetLastAttemptAt().IsValid() {
			t.Fatalf("counters %v", c)
		}
		if merged, _ := roster.MergeDiagnostics(nil, hello.GetDiagnostics()); len(merged) > len(hello.GetDiagnostics()) {
			t.Fatalf("%d diagnostics of %d", len(merged), len(hello.GetDiagnostics()))
		}
		again := proto.CloneOf(frame)
		bounds.Frame(again.ProtoReflect())
		bounds.Records(again.GetHello().GetDiagnostics(), time.Now())
		bounds.Records(again.GetDiagnostic().GetDiagnostics(), time.Now())
		if !proto.Equal(frame, again) {
			t.Fatalf("%v became %v", frame, again)
		}
	})
}

// bounded checks a diagnostic that was cleaned.
func bounded(t *testing.T, d *commonv1.Diagnostic) {
	t.Helper()
	for _, text := range []string{d.GetDetail(), d.GetRetryCorrelationId(), d.GetDedupeKeyHash()} {
		if len(text) > bounds.MostRecordText || strings.ContainsAny(text, "\x00\n\r\t\x1b\u202e") {
			t.Fatalf("text %q", text)
		}
	}
	for _, at := range []*timestamppb.Timestamp{d.GetObservedAt(), d.GetFirstSeenAt(), d.GetEndedAt()} {
		if at != nil && !at.IsValid() {
			t.Fatalf("time %v", at)
		}
	}
	if d.GetCount() < 1 || d.GetNextRetry().AsDuration() < 0 || d.GetNextRetry().AsDuration() > bounds.MostRecordWait {
		t.Fatalf("%v", d)
	}
}

// texts checks that each text of a message can be stored.
func texts(t *testing.T, m protoreflect.Message) {
	t.Helper()
	check := func(fd protoreflect.FieldDescriptor, v protoreflect.Value) {
		switch {
		case fd.Message() != nil:
			texts(t, v.Message())
		case fd.Kind() == protoreflect.StringKind && (!utf8.ValidString(v.String()) || strings.Contains(v.String(), "\x00")):
			t.Fatalf("%s is %q", fd.FullName(), v.String())
		}
	}
	m.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case fd.IsMap():
			v.Map().Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
				check(fd.MapKey(), k.Value())
				check(fd.MapValue(), v)
				return true
			})
		case fd.IsList():
			for i := range v.List().Len() {
				check(fd, v.List().Get(i))
			}
		default:
			check(fd, v)
		}
		return true
	})
}
