package output

import (
	"cmp"
	"fmt"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// Form prints the fields of a column.
type Form func(pr *Printer, fields []Field) string

// plain prints a field in the form of its type: a time as how long ago it was, an enum as its name, a list with commas.
func plain(pr *Printer, fields []Field) string {
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

func scalar(pr *Printer, desc protoreflect.FieldDescriptor, v protoreflect.Value) string {
	switch desc.Kind() { // the others print as they are
	case protoreflect.BoolKind:
		return human.YesNo(v.Bool())
	case protoreflect.EnumKind:
		if value := desc.Enum().Values().ByNumber(v.Enum()); value != nil {
			return names.ValueName(value)
		}
	case protoreflect.MessageKind:
		if at, ok := v.Message().Interface().(*timestamppb.Timestamp); ok {
			return pr.When(at)
		}
		return ""
	case protoreflect.DoubleKind, protoreflect.FloatKind:
		return human.Seconds(v.Float())
	}
	return v.String()
}

// NonZero prints a field that is set, as plain does.
func NonZero(pr *Printer, fields []Field) string {
	return human.OnlyIf(fields[0].set, plain(pr, fields[:1]))
}

// Upper prints a word in capitals.
func Upper(pr *Printer, fields []Field) string { return strings.ToUpper(plain(pr, fields)) }

// Dashed prints a word with dashes, as in the names of commands.
func Dashed(pr *Printer, fields []Field) string {
	return strings.ReplaceAll(plain(pr, fields), "_", "-")
}

// Lines prints a list of texts, one a line.
func Lines(_ *Printer, fields []Field) string {
	parts := make([]string, 0, fields[0].value.List().Len())
	for i := range fields[0].value.List().Len() {
		parts = append(parts, fields[0].value.List().Get(i).String())
	}
	return strings.Join(parts, "\n")
}

// NameOrID prints the names of a list of ids, one a line, and the id where there is no name. The fields are the names
// and the ids.
func NameOrID(_ *Printer, fields []Field) string {
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

// Length counts a list.
func Length(_ *Printer, fields []Field) string { return fmt.Sprint(fields[0].value.List().Len()) }

// InBytes prints an amount of storage.
func InBytes(_ *Printer, fields []Field) string { return human.Bytes(fields[0].value.Int()) }

// Share prints how much of a whole is used, nothing if there is no whole.
func Share(_ *Printer, fields []Field) string {
	if !fields[0].set && !fields[1].set {
		return ""
	}
	return fmt.Sprintf("%d/%d", fields[0].value.Int(), fields[1].value.Int())
}

// TrueFalse prints a boolean as true or false.
func TrueFalse(_ *Printer, fields []Field) string { return fields[0].value.String() }

// TrueOnly prints true, and nothing for false.
func TrueOnly(_ *Printer, fields []Field) string { return human.OnlyIf(fields[0].value.Bool(), "true") }

// Joined prints those of several fields that are set, separated by spaces.
func Joined(pr *Printer, fields []Field) string {
	var parts []string
	for i := range fields {
		if text := NonZero(pr, fields[i:]); text != "" {
			parts = append(parts, text)
		}
	}
	return strings.Join(parts, " ")
}

// Subject prints the subject of an entry: its kind, and its name if that is known, else its id. The fields are the
// kind, the id, and the names of the workspace, of the node and, where there is one, of any other subject.
func Subject(pr *Printer, fields []Field) string {
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

// Undone prints the name of a step, with "undo" before it if the attempt is an undo. The fields are the name and the
// direction.
func Undone(pr *Printer, fields []Field) string {
	return human.OnlyIf(plain(pr, fields[1:]) == names.Of(commonv1.Direction_DIRECTION_UNDO), "undo ") + plain(pr, fields)
}

// Layered prints an error after the layer that it comes from. The fields are the layer and the texts, of which the
// first that is set is printed.
func Layered(pr *Printer, fields []Field) string {
	layer, text := NonZero(pr, fields), NonZero(pr, fields[1:])
	return human.OnlyIf(layer != "" && text != "", "["+layer+"] ") + text
}
