package names_test

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
)

func TestOf(t *testing.T) {
	tests := []struct {
		in   protoreflect.Enum
		want string
	}{
		{commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED, "quarantined"},
		{commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED, "decommissioned"},
		{commonv1.Reason_REASON_SESSION_SUPERSEDED, "session_superseded"},
		{commonv1.Reason_REASON_REASON_REQUIRED, "reason_required"},
		{commonv1.TaskState_TASK_STATE_UNSPECIFIED, "unspecified"},
		{commonv1.TaskState(4711), "4711"},
		{commonv1.TaskType_TASK_TYPE_PROBE_NOOP, "probe.noop"},
		{commonv1.TaskType_TASK_TYPE_WORKLOAD_DEPLOY, "workload.deploy"},
		{commonv1.TaskType_TASK_TYPE_WORKLOAD_START, "workload.start"},
		{commonv1.TaskType_TASK_TYPE_WORKLOAD_STOP, "workload.stop"},
		{commonv1.TaskType_TASK_TYPE_WORKLOAD_RESTART, "workload.restart"},
		{commonv1.TaskType_TASK_TYPE_WORKLOAD_REMOVE, "workload.remove"},
		{commonv1.TaskType_TASK_TYPE_WORKLOAD_STATUS, "workload.status"},
		{commonv1.TaskType_TASK_TYPE_STORAGE_ALLOCATE, "storage.allocate"},
		{commonv1.TaskType_TASK_TYPE_STORAGE_RELEASE, "storage.release"},
		{commonv1.TaskType_TASK_TYPE_TERMINAL_OPEN, "terminal.open"},
		{commonv1.TaskType_TASK_TYPE_NODE_SELF_UPDATE, "node.self_update"},
		{commonv1.TaskType_TASK_TYPE_RECOVERY_TOKEN_ROTATE, "recovery_token.rotate"},
		{commonv1.TaskType_TASK_TYPE_VERIFIER_ROTATE, "verifier.rotate"},
		{commonv1.TaskType_TASK_TYPE_DIAGNOSTICS_COLLECT, "diagnostics.collect"},
		{commonv1.TaskType_TASK_TYPE_UNSPECIFIED, "unspecified"},
	}
	for _, tt := range tests {
		if got := names.Of(tt.in); got != tt.want {
			t.Errorf("Of(%v) = %q, want %q", tt.in, got, tt.want)
		}
	}
}

// Every task type must have a dot: a new noun has to be added to the package.
func TestEveryTaskTypeHasADot(t *testing.T) {
	for _, s := range names.Spellings[commonv1.TaskType]() {
		if strings.Count(s, ".") != 1 {
			t.Errorf("task type %q: want exactly one dot", s)
		}
	}
}

func TestParseOfRoundTripsForEveryEnum(t *testing.T) {
	seen := 0
	protoregistry.GlobalTypes.RangeEnums(func(et protoreflect.EnumType) bool {
		d := et.Descriptor()
		if !strings.HasPrefix(string(d.FullName()), "gpuaas.") {
			return true
		}
		spelled := map[string]bool{}
		for i := range d.Values().Len() {
			v := d.Values().Get(i)
			s := names.Of(et.New(v.Number()))
			if spelled[s] {
				t.Errorf("%s: spelling %q twice", d.FullName(), s)
			}
			spelled[s] = true
			if s != strings.ToLower(s) || s == strings.ToLower(string(v.Name())) {
				t.Errorf("%s: bad spelling %q", v.FullName(), s)
			}
			seen++
		}
		return true
	})
	if seen < 150 {
		t.Errorf("walked %d values: the registry is not loaded", seen)
	}
	roundTrip[commonv1.TaskType](t)
	roundTrip[commonv1.Reason](t)
	roundTrip[commonv1.WorkspaceState](t)
}

func roundTrip[E interface {
	protoreflect.Enum
	comparable
}](t *testing.T) {
	t.Helper()
	for _, e := range names.All[E]() {
		got, err := names.Parse[E](names.Of(e))
		if err != nil || got != e {
			t.Errorf("Parse(%q) = %v, %v", names.Of(e), got, err)
		}
	}
}

// TestSpellingsAreMadeOnce checks that spelling a value for an event and parsing one of a row allocate no new text.
func TestSpellingsAreMadeOnce(t *testing.T) {
	parse := func() {
		if got, err := names.Parse[commonv1.RunState]("compensating"); err != nil ||
			got != commonv1.RunState_RUN_STATE_COMPENSATING {
			t.Fatalf("Parse = %v, %v", got, err)
		}
	}
	spell := func() {
		if got := names.Of(commonv1.RunState_RUN_STATE_COMPENSATING); got != "compensating" {
			t.Fatalf("Of = %q", got)
		}
	}
	for what, call := range map[string]func(){"Parse": parse, "Of": spell} {
		if n := testing.AllocsPerRun(100, call); n > 1 { // the value itself, as an interface
			t.Errorf("%s allocates %v times", what, n)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	for _, s := range []string{"", "ACTIVE", "WORKSPACE_STATE_ACTIVE", "aktive", "1"} {
		if _, err := names.Parse[commonv1.WorkspaceState](s); err == nil || !strings.Contains(err.Error(), "provisioning") {
			t.Errorf("Parse(%q) = %v, want an error that lists the spellings", s, err)
		}
	}
}

func TestMarshalJSONOfADenial(t *testing.T) {
	full := &commonv1.Denial{
		Reason:        commonv1.Reason_REASON_QUOTA_EXCEEDED,
		Action:        commonv1.Action_ACTION_STOP,
		RetryAfter:    durationpb.New(1500 * time.Millisecond),
		Message:       "a \"quote\" <tag>\n",
		Unmet:         []string{"gpus"},
		CorrelationId: "c",
	}
	tests := []struct {
		name string
		in   proto.Message
		want string
	}{
		{
			"unset fields are printed", &commonv1.Denial{},
			`{"reason":"unspecified","action":"unspecified","retry_after":null,"message":"","remedy":"","unmet":[],` +
				`"conflicting_id":"","correlation_id":""}`,
		},
		{
			"full", full,
			`{"reason":"quota_exceeded","action":"stop","retry_after":1.5,"message":"a \"quote\" \u003ctag\u003e\n",` +
				`"remedy":"","unmet":["gpus"],"conflicting_id":"","correlation_id":"c"}`,
		},
		{"timestamp", timestamppb.New(time.Date(2026, 3, 1, 12, 0, 0, 250_000_000, time.UTC)), `"2026-03-01T12:00:00.25Z"`},
		{"whole duration", durationpb.New(90 * time.Second), `90`},
		{"negative duration", durationpb.New(-1500 * time.Millisecond), `-1.5`},
		{"nanosecond", durationpb.New(1), `0.000000001`},
		{"wrapper", wrapperspb.Int64(math.MaxInt64), `9223372036854775807`},
		{"nil", nil, `null`},
		{"typed nil", (*commonv1.Denial)(nil), `null`},
		{"struct", mustStruct(t), `{"a":[1,"x",null],"b":{"c":true}}`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := names.MarshalJSON(tt.in)
			if err != nil {
				t.Fatal(err)
			}
			if string(got) != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
		})
	}
}

func mustStruct(t *testing.T) *structpb.Struct {
	t.Helper()
	s, err := structpb.NewStruct(map[string]any{"b": map[string]any{"c": true}, "a": []any{1, "x", nil}})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// kinds builds a message type with every kind of field, so that the marshaller is tested with all without a proto file
// for it.
func kinds(t *testing.T) protoreflect.MessageType {
	t.Helper()
	type d = descriptorpb.FieldDescriptorProto
	n := int32(0)
	field := func(
		name string, kind descriptorpb.FieldDescriptorProto_Type, label descriptorpb.FieldDescriptorProto_Label,
		typeName string,
	) *d {
		n++
		f := &d{Name: proto.String(name), Number: proto.Int32(n), Type: kind.Enum(), Label: label.Enum()}
		if typeName != "" {
			f.TypeName = proto.String(typeName)
		}
		return f
	}
	one, many := descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL, descriptorpb.FieldDescriptorProto_LABEL_REPEATED
	fields := []*d{
		field("flag", descriptorpb.FieldDescriptorProto_TYPE_BOOL, one, ""),
		field("small", descriptorpb.FieldDescriptorProto_TYPE_INT32, one, ""),
		field("big", descriptorpb.FieldDescriptorProto_TYPE_INT64, one, ""),
		field("ubig", descriptorpb.FieldDescriptorProto_TYPE_UINT64, one, ""),
		field("usmall", descriptorpb.FieldDescriptorProto_TYPE_UINT32, one, ""),
		field("single", descriptorpb.FieldDescriptorProto_TYPE_FLOAT, one, ""),
		field("double_value", descriptorpb.FieldDescriptorProto_TYPE_DOUBLE, one, ""),
		field("raw", descriptorpb.FieldDescriptorProto_TYPE_BYTES, one, ""),
		field("type", descriptorpb.FieldDescriptorProto_TYPE_ENUM, one, ".gpuaas.common.v1.TaskType"),
		field("at", descriptorpb.FieldDescriptorProto_TYPE_MESSAGE, one, ".google.protobuf.Timestamp"),
		field("ttl_seconds", descriptorpb.FieldDescriptorProto_TYPE_MESSAGE, one, ".google.protobuf.Duration"),
		field("denials", descriptorpb.FieldDescriptorProto_TYPE_MESSAGE, many, ".gpuaas.common.v1.Denial"),
		field("states", descriptorpb.FieldDescriptorProto_TYPE_ENUM, many, ".gpuaas.common.v1.TaskState"),
		field("labels", descriptorpb.FieldDescriptorProto_TYPE_MESSAGE, many, ".t.Kinds.LabelsEntry"),
		field("counts", descriptorpb.FieldDescriptorProto_TYPE_MESSAGE, many, ".t.Kinds.CountsEntry"),
		field("maybe", descriptorpb.FieldDescriptorProto_TYPE_INT64, one, ""),
		field("text_choice", descriptorpb.FieldDescriptorProto_TYPE_STRING, one, ""),
		field("number_choice", descriptorpb.FieldDescriptorProto_TYPE_INT64, one, ""),
	}
	fields[15].OneofIndex, fields[15].Proto3Optional = proto.Int32(1), proto.Bool(true)
	fields[16].OneofIndex, fields[17].OneofIndex = proto.Int32(0), proto.Int32(0)
	entry := func(name string, key, value descriptorpb.FieldDescriptorProto_Type) *descriptorpb.DescriptorProto {
		return &descriptorpb.DescriptorProto{
			Name:    proto.String(name),
			Options: &descriptorpb.MessageOptions{MapEntry: proto.Bool(true)},
			Field: []*d{
				{Name: proto.String("key"), Number: proto.Int32(1), Type: key.Enum(), Label: one.Enum()},
				{Name: proto.String("value"), Number: proto.Int32(2), Type: value.Enum(), Label: one.Enum()},
			},
		}
	}
	file := &descriptorpb.FileDescriptorProto{
		Name: proto.String("t/kinds.proto"), Package: proto.String("t"), Syntax: proto.String("proto3"),
		Dependency: []string{
			"gpuaas/common/v1/states.proto", "gpuaas/common/v1/fault.proto",
			"google/protobuf/timestamp.proto", "google/protobuf/duration.proto",
		},
		MessageType: []*descriptorpb.DescriptorProto{{
			Name: proto.String("Kinds"), Field: fields,
			OneofDecl: []*descriptorpb.OneofDescriptorProto{{Name: proto.String("choice")}, {Name: proto.String("_maybe")}},
			NestedType: []*descriptorpb.DescriptorProto{
				entry("LabelsEntry", descriptorpb.FieldDescriptorProto_TYPE_STRING, descriptorpb.FieldDescriptorProto_TYPE_STRING),
				entry("CountsEntry", descriptorpb.FieldDescriptorProto_TYPE_INT64, descriptorpb.FieldDescriptorProto_TYPE_BOOL),
			},
		}},
	}
	fd, err := protodesc.NewFile(file, protoregistry.GlobalFiles)
	if err != nil {
		t.Fatal(err)
	}
	return dynamicpb.NewMessageType(fd.Messages().Get(0))
}

func TestMarshalAndUnmarshalEveryKind(t *testing.T) {
	mt := kinds(t)
	tests := []struct {
		name string
		json string
	}{
		{
			name: "empty",
			json: `{"flag":false,"small":0,"big":0,"ubig":0,"usmall":0,"single":0,"double_value":0,"raw":"",` +
				`"type":"unspecified","at":null,"ttl_seconds":null,"denials":[],"states":[],"labels":{},"counts":{},` +
				`"maybe":null,"text_choice":null,"number_choice":null}`,
		},
		{
			name: "set",
			json: `{"flag":true,"small":-5,"big":9223372036854775807,"ubig":18446744073709551615,"usmall":7,` +
				`"single":0.25,"double_value":1.5,"raw":"AAE=","type":"workload.deploy","at":"2026-03-01T12:00:00Z",` +
				`"ttl_seconds":2.25,"denials":[{"reason":"conflict","action":"wait","retry_after":3,"message":"m",` +
				`"remedy":"r","unmet":["a"],"conflicting_id":"x","correlation_id":"y"}],` +
				`"states":["queued","outcome_unknown"],"labels":{"a":"1","b":"2"},"counts":{"-1":true,"2":false},` +
				`"maybe":0,"text_choice":"","number_choice":null}`,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := mt.New().Interface()
			if err := names.UnmarshalInto([]byte(tt.json), m); err != nil {
				t.Fatal(err)
			}
			got, err := names.MarshalJSON(m)
			if err != nil {
				t.Fatal(err)
			}
			if string(got) != tt.json {
				t.Errorf("got  %s\nwant %s", got, tt.json)
			}
		})
	}
}

func TestUnmarshalRefuses(t *testing.T) {
	mt := kinds(t)
	for _, in := range []string{
		``, `{`, `[]`, `{} {}`, `{"nope":1}`, `{"small":2147483648}`, `{"small":1.5}`, `{"big":"7"}`, `{"flag":1}`,
		`{"raw":"%"}`, `{"type":"workload_deploy"}`, `{"at":5}`, `{"at":"yesterday"}`, `{"ttl_seconds":"2s"}`,
		`{"ttl_seconds":1e300}`, `{"denials":{}}`, `{"labels":[]}`, `{"counts":{"x":true}}`, `{"denials":[{"reason":"zzz"}]}`,
		`{"states":[null]}`,
	} {
		if err := names.UnmarshalInto([]byte(in), mt.New().Interface()); err == nil {
			t.Errorf("UnmarshalInto(%s): want an error", in)
		}
	}
}

// TestRefusalsNameTheFieldAndWhatIsAllowed checks the texts that a person gets for a file that is wrong.
func TestRefusalsNameTheFieldAndWhatIsAllowed(t *testing.T) {
	for in, want := range map[string]string{
		`{"denials":[{},{"nope":1}]}`:          "denials: 1: nope: unknown field of Denial",
		`{"denials":[{"reason":"zzz"}]}`:       `denials: 0: reason: "zzz" is not a Reason: want one of `,
		`{"small":"7"}`:                        "small: want a number, got text",
		`{"labels":{"a":1}}`:                   "labels: a: want text, got a number",
		`{"flag":1}`:                           "flag: want true or false, got a number",
		`{"states":{}}`:                        "states: want a list, got an object",
		`{"at":"yesterday"}`:                   `at: "yesterday" is not a time in RFC 3339`,
		`{"small":2147483648}`:                 "small: 2147483648 is not a number of this field's range",
		`{"small":1e2}`:                        "small: 1e2 is not a number of this field's range",
		`{"raw":"%"}`:                          "raw: want base64",
		`{"ttl_seconds":1e300}`:                "ttl_seconds: 1e300 is not a number of this field's range",
		`{"ttl_seconds":"2s"}`:                 "ttl_seconds: want a number of seconds, got text",
		`{"denials":[{"retry_after":[1, 2]}]}`: "denials: 0: retry_after: want a number of seconds, got a list",
	} {
		err := names.UnmarshalInto([]byte(in), kinds(t).New().Interface())
		if err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("UnmarshalInto(%s): %v, want %q", in, err, want)
		}
	}
}

func TestUnmarshalGeneric(t *testing.T) {
	want := &commonv1.Denial{Reason: commonv1.Reason_REASON_CONFLICT, RetryAfter: durationpb.New(250 * time.Millisecond)}
	raw, err := names.MarshalJSON(want)
	if err != nil {
		t.Fatal(err)
	}
	got, err := names.Unmarshal[*commonv1.Denial](raw)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
	if _, err := names.Unmarshal[*commonv1.Denial]([]byte(`{"reason":1}`)); err == nil {
		t.Error("want an error for an enum as a number")
	}
}

func TestMarshalRefusesWhatIsNotUTF8(t *testing.T) {
	if _, err := names.MarshalJSON(&commonv1.Denial{Message: "\xff"}); err == nil {
		t.Error("want an error")
	}
}
