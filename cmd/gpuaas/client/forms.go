package client

import (
	"cmp"
	"fmt"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// form prints the fields of a column.
type form func(pr *printer, fields []field) string

// plain prints a field in the form of its type: a time as how long ago it was, an enum as its name, a list with commas.
func plain(pr *printer, fields []field) string {
	f := fields[0]
	switch {
	case f.desc == nil || f.desc.IsMap():
		return ""
	case f.desc.IsList():
		parts := make([]string, 0, f.value.List().Len())
		for i := range f.value.List().Len() {
			parts = append(parts, scalar(pr, f.desc, f.value.List().Get(i)))
		}
		return strings.Join(parts, ",")
	case !f.set && (f.desc.Kind() == protoreflect.MessageKind || f.desc.Kind() == protoreflect.EnumKind):
		return ""
	}
	return scalar(pr, f.desc, f.value)
}

func scalar(pr *printer, desc protoreflect.FieldDescriptor, v protoreflect.Value) string {
	switch desc.Kind() { //nolint:exhaustive // the others print as they are
	case protoreflect.BoolKind:
		return yesNo(v.Bool())
	case protoreflect.EnumKind:
		if value := desc.Enum().Values().ByNumber(v.Enum()); value != nil {
			return names.ValueName(value)
		}
	case protoreflect.MessageKind:
		if at, ok := v.Message().Interface().(*timestamppb.Timestamp); ok {
			return pr.when(at)
		}
		return ""
	case protoreflect.DoubleKind, protoreflect.FloatKind:
		return seconds(v.Float())
	}
	return v.String()
}

// nonzero prints a field that is set, as plain does.
func nonzero(pr *printer, fields []field) string { return onlyIf(fields[0].set, plain(pr, fields[:1])) }

// upper prints a word in capitals.
func upper(pr *printer, fields []field) string { return strings.ToUpper(plain(pr, fields)) }

// dashed prints a word with dashes, as in the names of commands.
func dashed(pr *printer, fields []field) string {
	return strings.ReplaceAll(plain(pr, fields), "_", "-")
}

// lines prints a list of texts, one a line.
func lines(_ *printer, fields []field) string {
	parts := make([]string, 0, fields[0].value.List().Len())
	for i := range fields[0].value.List().Len() {
		parts = append(parts, fields[0].value.List().Get(i).String())
	}
	return strings.Join(parts, "\n")
}

// nameOrID prints the names of a list of ids, one a line, and the id where there is no name. The fields are the names
// and the ids.
func nameOrID(_ *printer, fields []field) string {
	known, ids := fields[0].value.List(), fields[1].value.List()
	parts := make([]string, ids.Len())
	for i := range parts {
		parts[i] = ids.Get(i).String()
		if i < known.Len() {
			parts[i] = cmp.Or(known.Get(i).String(), parts[i])
		}
	}
	return strings.Join(parts, "\n")
}

// length counts a list.
func length(_ *printer, fields []field) string { return fmt.Sprint(fields[0].value.List().Len()) }

// inBytes prints an amount of storage.
func inBytes(_ *printer, fields []field) string { return bytesText(fields[0].value.Int()) }

// share prints how much of a whole is used, nothing if there is no whole.
func share(_ *printer, fields []field) string {
	if !fields[0].set && !fields[1].set {
		return ""
	}
	return fmt.Sprintf("%d/%d", fields[0].value.Int(), fields[1].value.Int())
}

// trueFalse prints a boolean as true or false.
func trueFalse(_ *printer, fields []field) string { return fields[0].value.String() }

// trueOnly prints true, and nothing for false.
func trueOnly(_ *printer, fields []field) string { return onlyIf(fields[0].value.Bool(), "true") }

// joined prints those of several fields that are set, separated by spaces.
func joined(pr *printer, fields []field) string {
	var parts []string
	for i := range fields {
		if text := nonzero(pr, fields[i:]); text != "" {
			parts = append(parts, text)
		}
	}
	return strings.Join(parts, " ")
}

// subject prints the subject of an entry: its kind, and its name if that is known, else its id. The fields are the
// kind, the id, and the names of the workspace, of the node and, where there is one, of any other subject.
func subject(pr *printer, fields []field) string {
	kind, name := plain(pr, fields), plain(pr, fields[1:])
	switch kind {
	case "workspace":
		name = cmp.Or(plain(pr, fields[2:]), name)
	case "node":
		name = cmp.Or(plain(pr, fields[3:]), name)
	default:
		if len(fields) > 4 {
			name = cmp.Or(plain(pr, fields[4:]), name)
		}
	}
	return strings.TrimSpace(kind + " " + name)
}

// undone prints the name of a step, with "undo" before it if the attempt is an undo. The fields are the name and the
// direction.
func undone(pr *printer, fields []field) string {
	return onlyIf(plain(pr, fields[1:]) == names.Of(commonv1.Direction_DIRECTION_UNDO), "undo ") + plain(pr, fields)
}

// layered prints an error after the layer that it comes from. The fields are the layer and the texts, of which the
// first that is set is printed.
func layered(pr *printer, fields []field) string {
	layer, text := nonzero(pr, fields), nonzero(pr, fields[1:])
	return onlyIf(layer != "" && text != "", "["+layer+"] ") + text
}
