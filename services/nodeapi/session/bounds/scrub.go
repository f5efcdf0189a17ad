package bounds

import (
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// Frame removes from a frame what cannot be stored: NUL in its strings, and times and durations out of their range. NUL
// is valid in a protobuf string, but not in a text or jsonb value of Postgres, and a time beyond the year 9999 has no
// spelling in JSON: in a batch that many nodes share, one agent's value would otherwise fail the reports of all of
// them.
func Frame(m protoreflect.Message) {
	m.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case fd.IsMap():
			frameMap(fd, v.Map())
		case fd.IsList():
			frameList(fd, v.List())
		case fd.Message() != nil && outOfRange(v.Message()):
			m.Clear(fd)
		case fd.Message() != nil:
			Frame(v.Message())
		case fd.Kind() == protoreflect.StringKind && strings.IndexByte(v.String(), 0) >= 0:
			m.Set(fd, protoreflect.ValueOfString(withoutNUL(v.String())))
		}
		return true
	})
}

func frameList(fd protoreflect.FieldDescriptor, list protoreflect.List) {
	for i := range list.Len() {
		switch {
		case fd.Message() != nil:
			Frame(list.Get(i).Message())
		case fd.Kind() == protoreflect.StringKind && strings.IndexByte(list.Get(i).String(), 0) >= 0:
			list.Set(i, protoreflect.ValueOfString(withoutNUL(list.Get(i).String())))
		}
	}
}

// frameMap cleans values; a key with a NUL is dropped with its value.
func frameMap(fd protoreflect.FieldDescriptor, entries protoreflect.Map) {
	entries.Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
		switch {
		case fd.MapKey().Kind() == protoreflect.StringKind && strings.IndexByte(k.String(), 0) >= 0:
			entries.Clear(k)
		case fd.MapValue().Message() != nil:
			Frame(v.Message())
		case fd.MapValue().Kind() == protoreflect.StringKind && strings.IndexByte(v.String(), 0) >= 0:
			entries.Set(k, protoreflect.ValueOfString(withoutNUL(v.String())))
		}
		return true
	})
}

// outOfRange reports whether a message is a time or a duration that is out of its range.
func outOfRange(m protoreflect.Message) bool {
	switch v := m.Interface().(type) {
	case *timestamppb.Timestamp:
		return v.CheckValid() != nil
	case *durationpb.Duration:
		return v.CheckValid() != nil
	default:
		return false
	}
}

func withoutNUL(s string) string { return strings.ReplaceAll(s, "\x00", "\uFFFD") }
