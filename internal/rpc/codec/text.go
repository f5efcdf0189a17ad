package codec

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// TextRules are the rules for the texts of a request. Postgres stores no U+0000, so no text may have one. A format
// character (category Cf of Unicode: bidirectional controls, zero-width characters) makes two names look alike, so on
// the ports of people no name may have one.
type TextRules struct {
	Names bool // refuse format characters in names too
}

// proseFields returns the fields that hold sentences, output and values of people. Every other text is a name, or
// refers to something by its name.
func proseFields() []string {
	return []string{"reason", "args", "command", "env", "value", "detail", "message", "note", "summary", "user_agent"}
}

// suspicious reports whether encoded bytes can hold a text that breaks the rules. It is much cheaper than check, and
// most requests hold none: U+0000 is a zero byte in protobuf and an escape in JSON, and a format character has bytes
// above ASCII, or an escape.
func (t TextRules) suspicious(data []byte) bool {
	if bytes.IndexByte(data, 0) >= 0 || bytes.Contains(data, []byte(`\u`)) {
		return true
	}
	return t.Names && bytes.IndexFunc(data,
		func(r rune) bool { return r == utf8.RuneError || unicode.Is(unicode.Cf, r) }) >= 0
}

// check returns what is wrong with the first text that breaks the rules, by the path of its field; empty if none does.
func (t TextRules) check(m protoreflect.Message) string { return t.message(m, "", false) }

func (t TextRules) message(m protoreflect.Message, path string, prose bool) string {
	problem := ""
	m.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		problem = t.field(field, value, strings.TrimPrefix(path+"."+string(field.Name()), "."), prose)
		return problem == ""
	})
	return problem
}

func (t TextRules) field(field protoreflect.FieldDescriptor, value protoreflect.Value, path string, prose bool) string {
	prose = prose || slices.Contains(proseFields(), string(field.Name()))
	switch {
	case field.IsMap():
		problem := ""
		value.Map().Range(func(key protoreflect.MapKey, entry protoreflect.Value) bool {
			// The key names an entry, whatever its value is, and may itself break the rules.
			at := fmt.Sprintf("%s[%q]", path, key.String())
			if field.MapKey().Kind() == protoreflect.StringKind {
				problem = t.text(key.String(), at, false)
			}
			if problem == "" {
				problem = t.value(field.MapValue(), entry, at, prose)
			}
			return problem == ""
		})
		return problem
	case field.IsList():
		list := value.List()
		for i := range list.Len() {
			if problem := t.value(field, list.Get(i), fmt.Sprintf("%s[%d]", path, i), prose); problem != "" {
				return problem
			}
		}
		return ""
	default:
		return t.value(field, value, path, prose)
	}
}

func (t TextRules) value(field protoreflect.FieldDescriptor, value protoreflect.Value, path string, prose bool) string {
	switch field.Kind() { // texts alone are judged, wherever they stand
	case protoreflect.StringKind:
		return t.text(value.String(), path, prose)
	case protoreflect.MessageKind, protoreflect.GroupKind:
		return t.message(value.Message(), path, prose)
	default:
		return ""
	}
}

func (t TextRules) text(s, path string, prose bool) string {
	for _, c := range s {
		switch {
		case c == 0:
			return path + ": it contains U+0000, which cannot be stored"
		case t.Names && !prose && unicode.Is(unicode.Cf, c):
			return fmt.Sprintf("%s: it contains U+%04X, a character that is not seen; names are written without it", path, c)
		}
	}
	return ""
}
