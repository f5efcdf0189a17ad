package output

import (
	"regexp"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Column is one column of a table of T. One that is neither optional, wide nor free text is a key: always there, and
// never cut.
type Column[T any] struct {
	Title string
	// Path names the fields of the message that are shown, as a.b.c; those of several are separated by spaces. Of `a|b`
	// the first that is set counts.
	Path string
	// As prints the fields; nil prints the first one in the form of its type.
	As Form
	// Of computes the text from the whole item instead.
	Of func(pr *Printer, item T) string

	Drop int  // where the table is too wide the optional column with the greatest number goes first
	Wide bool // only in `-o wide` and in details
	Text bool // free text: cut instead when its turn comes, which without a number is the last
	// Below moves the column, uncut, to lines of its own under each row when its turn comes, instead of dropping it.
	Below bool
	ID    bool // on a terminal only the end of an id is shown
	// Moves marks a column whose value changes all the time: such a change does not make a row a changed one.
	Moves bool
}

// optional reports whether the column may be left out where the table is too wide.
func (c Column[T]) optional() bool { return c.Drop > 0 || c.Text || c.Below }

// Field is one field of a message, as it is set or by default.
type Field struct {
	desc  protoreflect.FieldDescriptor
	value protoreflect.Value
	set   bool
}

// show returns the text of the column for an item.
func (c Column[T]) show(pr *Printer, item T) string {
	if c.Of != nil {
		return c.Of(pr, item)
	}
	message, ok := any(item).(proto.Message)
	if !ok {
		return ""
	}
	fields := fieldsOf(message.ProtoReflect(), c.Path)
	if c.As != nil {
		return c.As(pr, fields)
	}
	return plain(pr, fields)
}

// fieldsOf returns the field of each path. A test of all views finds a path that the message does not have.
func fieldsOf(m protoreflect.Message, paths string) []Field {
	var out []Field
	for path := range strings.FieldsSeq(paths) {
		var found Field
		for choice := range strings.SplitSeq(path, "|") {
			if found = fieldOf(m, choice); found.set {
				break
			}
		}
		out = append(out, found)
	}
	return out
}

func fieldOf(m protoreflect.Message, path string) Field {
	name, rest, deeper := strings.Cut(path, ".")
	desc := m.Descriptor().Fields().ByName(protoreflect.Name(name))
	if desc == nil {
		return Field{}
	}
	if deeper {
		return fieldOf(m.Get(desc).Message(), rest)
	}
	return Field{desc: desc, value: m.Get(desc), set: m.Has(desc)}
}

var anyID = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`)

// shortID is how many hex digits of an id a table shows at least.
const shortID = 8

// ShortIDs reduces each id in a column to its last digits, and keeps more of them if two ids would look the same.
func ShortIDs(cells []string) []string {
	whole := map[string]bool{}
	for _, cell := range cells {
		for _, id := range anyID.FindAllString(cell, -1) {
			whole[strings.ReplaceAll(id, "-", "")] = true
		}
	}
	digits := shortID
	for ; digits < 32; digits++ {
		ends := make(map[string]bool, len(whole))
		for id := range whole {
			ends[id[len(id)-digits:]] = true
		}
		if len(ends) == len(whole) {
			break
		}
	}
	out := make([]string, len(cells))
	for i, cell := range cells {
		out[i] = anyID.ReplaceAllStringFunc(cell, func(id string) string {
			id = strings.ReplaceAll(id, "-", "")
			return id[len(id)-digits:]
		})
	}
	return out
}
