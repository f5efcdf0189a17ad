package bounds

import (
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// Frame removes NUL from every string of a frame. NUL is valid in a protobuf string, but not in a text or jsonb value
// of Postgres: in a batch that many nodes share, one agent's NUL would otherwise fail the reports of all of them.
func Frame(m protoreflect.Message) {
	m.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case fd.IsMap():
			frameMap(fd, v.Map())
		case fd.IsList():
			frameList(fd, v.List())
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

func withoutNUL(s string) string { return strings.ReplaceAll(s, "\x00", "\uFFFD") }
