package session

import (
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// scrub removes NUL from every string of a frame. NUL is valid in a protobuf string, but not in a text or jsonb value
// of Postgres: in a batch that many nodes share, one agent's NUL would otherwise fail the reports of all of them.
func scrub(m protoreflect.Message) {
	m.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case fd.IsMap():
			scrubMap(fd, v.Map())
		case fd.IsList():
			scrubList(fd, v.List())
		case fd.Message() != nil:
			scrub(v.Message())
		case fd.Kind() == protoreflect.StringKind && strings.IndexByte(v.String(), 0) >= 0:
			m.Set(fd, protoreflect.ValueOfString(withoutNUL(v.String())))
		}
		return true
	})
}

func scrubList(fd protoreflect.FieldDescriptor, list protoreflect.List) {
	for i := range list.Len() {
		switch {
		case fd.Message() != nil:
			scrub(list.Get(i).Message())
		case fd.Kind() == protoreflect.StringKind && strings.IndexByte(list.Get(i).String(), 0) >= 0:
			list.Set(i, protoreflect.ValueOfString(withoutNUL(list.Get(i).String())))
		}
	}
}

// scrubMap cleans values; a key with a NUL is dropped with its value.
func scrubMap(fd protoreflect.FieldDescriptor, entries protoreflect.Map) {
	entries.Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
		switch {
		case fd.MapKey().Kind() == protoreflect.StringKind && strings.IndexByte(k.String(), 0) >= 0:
			entries.Clear(k)
		case fd.MapValue().Message() != nil:
			scrub(v.Message())
		case fd.MapValue().Kind() == protoreflect.StringKind && strings.IndexByte(v.String(), 0) >= 0:
			entries.Set(k, protoreflect.ValueOfString(withoutNUL(v.String())))
		}
		return true
	})
}

func withoutNUL(s string) string { return strings.ReplaceAll(s, "\x00", "\uFFFD") }
