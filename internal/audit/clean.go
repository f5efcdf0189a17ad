package audit

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/structpb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
)

// Clean returns a copy of m without secrets: the values of environments, the arguments and commands of workloads,
// bytes, texts in fields that are named for a secret, and texts elsewhere that look like one. Names and the number of
// values stay.
func Clean[M proto.Message](m M) M {
	out, _ := proto.Clone(m).(M)
	clean(out.ProtoReflect())
	return out
}

// hiddenField reports whether a field is secret. Some fields are secret whatever their names, because what a tenant
// gives its own workload may hold anything.
func hiddenField(f protoreflect.FieldDescriptor) bool {
	switch f.FullName() {
	case "gpuaas.node.v1.Workload.env", "gpuaas.node.v1.Workload.args", "gpuaas.node.v1.Workload.command":
		return true
	default:
		return f.Kind() == protoreflect.BytesKind || secretName(string(f.Name()))
	}
}

// secretName reports whether the name of a field or key is that of a secret. Tokens that only name a position
// (page_token, resume_token) are not secrets.
func secretName(name string) bool {
	name = strings.ToLower(name)
	switch name {
	case "page_token", "next_page_token", "resume_token":
		return false
	case "token", "secret", "password", "passwd", "credential", "credentials", "private_key", "secret_env", "api_key",
		"cookie", "authorization":
		return true
	}
	for _, end := range []string{
		"_token", "_secret", "_password", "_credential", "_credentials", "_private_key",
		"_api_key",
	} {
		if strings.HasSuffix(name, end) {
			return true
		}
	}
	return false
}

func clean(m protoreflect.Message) {
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		hidden := hiddenField(f)
		switch {
		case f.IsMap():
			cleanMap(f, v.Map(), hidden)
		case f.IsList():
			list := v.List()
			for i := range list.Len() {
				if f.Message() != nil {
					clean(list.Get(i).Message())
				} else {
					list.Set(i, cleanValue(f, list.Get(i), hidden))
				}
			}
		case f.Message() != nil:
			if s, ok := v.Message().Interface().(*structpb.Struct); ok {
				m.Set(f, protoreflect.ValueOfMessage(cleanStruct(s).ProtoReflect()))
			} else {
				clean(v.Message())
			}
		default:
			m.Set(f, cleanValue(f, v, hidden))
		}
		return true
	})
	m.SetUnknown(nil)
}

func cleanMap(f protoreflect.FieldDescriptor, entries protoreflect.Map, hidden bool) {
	value := f.MapValue()
	entries.Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
		if value.Message() != nil {
			clean(v.Message())
		} else {
			entries.Set(k, cleanValue(value, v, hidden || hiddenField(value) || secretName(k.String())))
		}
		return true
	})
}

func cleanValue(f protoreflect.FieldDescriptor, v protoreflect.Value, hidden bool) protoreflect.Value {
	switch f.Kind() { // numbers, flags and enums are no secrets
	case protoreflect.StringKind:
		if hidden && v.String() != "" {
			return protoreflect.ValueOfString(obs.Redacted)
		}
		return protoreflect.ValueOfString(obs.Redact(v.String()))
	case protoreflect.BytesKind:
		if len(v.Bytes()) == 0 {
			return v
		}
		return protoreflect.ValueOfBytes([]byte(obs.Redacted))
	default:
		return v
	}
}

func cleanStruct(s *structpb.Struct) *structpb.Struct {
	out := &structpb.Struct{Fields: make(map[string]*structpb.Value, len(s.GetFields()))}
	for k, v := range s.GetFields() {
		out.Fields[k] = cleanDynamic(v, secretName(k))
	}
	return out
}

func cleanDynamic(v *structpb.Value, hidden bool) *structpb.Value {
	switch kind := v.GetKind().(type) {
	case *structpb.Value_StringValue:
		if hidden && kind.StringValue != "" {
			return structpb.NewStringValue(obs.Redacted)
		}
		return structpb.NewStringValue(obs.Redact(kind.StringValue))
	case *structpb.Value_StructValue:
		return structpb.NewStructValue(cleanStruct(kind.StructValue))
	case *structpb.Value_ListValue:
		list := &structpb.ListValue{}
		for _, item := range kind.ListValue.GetValues() {
			list.Values = append(list.Values, cleanDynamic(item, hidden))
		}
		return structpb.NewListValue(list)
	default:
		return v
	}
}

// details makes what a caller wrote down printable and harmless. Of a value whose type is not known only the type is
// kept.
func details(in map[string]any) *structpb.Struct {
	if len(in) == 0 {
		return nil
	}
	out := &structpb.Struct{Fields: make(map[string]*structpb.Value, len(in))}
	for k, v := range in {
		if secretName(k) {
			v = obs.Secret("")
		}
		out.Fields[k] = value(v)
	}
	return out
}

func value(v any) *structpb.Value {
	switch v := v.(type) {
	case nil:
		return structpb.NewNullValue()
	case obs.Secret:
		return structpb.NewStringValue(obs.Redacted)
	case []byte:
		return structpb.NewStringValue(fmt.Sprintf("%s (%d bytes)", obs.Redacted, len(v)))
	case string:
		return structpb.NewStringValue(text(v))
	case bool:
		return structpb.NewBoolValue(v)
	case int:
		return structpb.NewNumberValue(float64(v))
	case int32:
		return structpb.NewNumberValue(float64(v))
	case int64:
		return structpb.NewNumberValue(float64(v))
	case float64:
		return structpb.NewNumberValue(v)
	case time.Time:
		return structpb.NewStringValue(v.UTC().Format(time.RFC3339Nano))
	case time.Duration:
		return structpb.NewStringValue(v.String())
	case error:
		return structpb.NewStringValue(text(v.Error()))
	case []string:
		list := &structpb.ListValue{}
		for _, s := range v {
			list.Values = append(list.Values, value(s))
		}
		return structpb.NewListValue(list)
	case []any:
		list := &structpb.ListValue{}
		for _, item := range v {
			list.Values = append(list.Values, value(item))
		}
		return structpb.NewListValue(list)
	case map[string]any:
		return structpb.NewStructValue(details(v))
	case protoreflect.Enum:
		return structpb.NewStringValue(names.Of(v))
	case proto.Message:
		return message(v)
	default:
		return structpb.NewStringValue(fmt.Sprintf("(%T)", v))
	}
}

func message(m proto.Message) *structpb.Value {
	raw, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(Clean(m))
	var fields map[string]any
	if err == nil {
		err = json.Unmarshal(raw, &fields)
	}
	if err != nil {
		return structpb.NewStringValue(fmt.Sprintf("(%T)", m))
	}
	return structpb.NewStructValue(details(fields))
}

func put(e *commonv1.AuditEntry, key, text string) {
	if e.GetDetails() == nil {
		e.Details = &structpb.Struct{Fields: map[string]*structpb.Value{}}
	}
	e.Details.Fields[key] = structpb.NewStringValue(text)
}
