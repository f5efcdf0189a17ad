package client

import (
	"regexp"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// column is one column of a table of T. One that is neither optional, wide nor free text is a key: always there, and
// never cut.
type column[T any] struct {
	title string
	// path names the fields of the message that are shown, as a.b.c; those of several are separated by spaces. Of `a|b`
	// the first that is set counts.
	path string
	// as prints the fields; nil prints the first one in the form of its type.
	as form
	// of computes the text from the whole item instead.
	of func(pr *printer, item T) string

	drop int  // where the table is too wide the optional column with the greatest number goes first
	wide bool // only in `-o wide` and in details
	text bool // free text: cut instead when its turn comes, which without a number is the last
	// below moves the column, uncut, to lines of its own under each row when its turn comes, instead of dropping it.
	below bool
	id    bool // on a terminal only the end of an id is shown
	// moves marks a column whose value changes all the time: such a change does not make a row a changed one.
	moves bool
}

// optional reports whether the column may be left out where the table is too wide.
func (c column[T]) optional() bool { return c.drop > 0 || c.text || c.below }

// field is one field of a message, as it is set or by default.
type field struct {
	desc  protoreflect.FieldDescriptor
	value protoreflect.Value
	set   bool
}

// show returns the text of the column for an item.
func (c column[T]) show(pr *printer, item T) string {
	if c.of != nil {
		return c.of(pr, item)
	}
	message, ok := any(item).(proto.Message)
	if !ok {
		return ""
	}
	fields := fieldsOf(message.ProtoReflect(), c.path)
	if c.as != nil {
		return c.as(pr, fields)
	}
	return plain(pr, fields)
}

// fieldsOf returns the field of each path. A test of all views finds a path that the message does not have.
func fieldsOf(m protoreflect.Message, paths string) []field {
	var out []field
	for path := range strings.FieldsSeq(paths) {
		var found field
		for choice := range strings.SplitSeq(path, "|") {
			if found = fieldOf(m, choice); found.set {
				break
			}
		}
		out = append(out, found)
	}
	return out
}

func fieldOf(m protoreflect.Message, path string) field {
	name, rest, deeper := strings.Cut(path, ".")
	desc := m.Descriptor().Fields().ByName(protoreflect.Name(name))
	if desc == nil {
		return field{}
	}
	if deeper {
		return fieldOf(m.Get(desc).Message(), rest)
	}
	return field{desc: desc, value: m.Get(desc), set: m.Has(desc)}
}

var anyID = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`)

// shortID is how many hex digits of an id a table shows at least.
const shortID = 8

// shorten reduces each id in a column to its last digits, and keeps more of them if two ids would look the same.
func shorten(cells []string) []string {
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
