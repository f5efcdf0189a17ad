// Package names owns how states, reasons and messages are spelled outside Go: in JSON, SQL, logs and metric labels.
//
// A state or reason is spelled as its proto value name without the enum's prefix, in lower case (`active`, `cert_expired`); a task type has a
// dot between what it acts on and what it does (`workload.deploy`). Messages are printed by one marshaller, MarshalJSON. The package believes
// the descriptors and never invents a spelling of its own.
//
// Guarantees: Parse(Of(x)) is x for every declared value; MarshalJSON prints the same bytes for equal messages.
package names

import (
	"fmt"
	"strconv"
	"strings"
	"sync"

	"google.golang.org/protobuf/reflect/protoreflect"
)

const taskTypeEnum protoreflect.FullName = "gpuaas.common.v1.TaskType"

// taskNouns are what tasks act on; the dot of a task type stands after one of them.
var taskNouns = []string{"probe", "workload", "storage", "terminal", "node", "recovery_token", "verifier", "diagnostics"}

// Of spells an enum value: its name without the enum's prefix, lower case. A number the enum does not declare is spelled as the number.
func Of(e protoreflect.Enum) string {
	return spell(e.Descriptor(), e.Number())
}

// Parse reads a value as Of spells it. The error names the enum and the spellings that exist.
func Parse[E protoreflect.Enum](s string) (E, error) {
	var zero E
	n, err := parse(zero.Descriptor(), s)
	if err != nil {
		return zero, err
	}
	e, ok := zero.Type().New(n).(E)
	if !ok {
		return zero, fmt.Errorf("enum %s is not generated as %T", zero.Descriptor().FullName(), zero)
	}
	return e, nil
}

// All answers every declared value but the unspecified one, in the order of the declaration.
func All[E protoreflect.Enum]() []E {
	var zero E
	values := zero.Descriptor().Values()
	out := make([]E, 0, values.Len())
	for i := range values.Len() {
		if n := values.Get(i).Number(); n != 0 {
			if e, ok := zero.Type().New(n).(E); ok {
				out = append(out, e)
			}
		}
	}
	return out
}

// Spellings answers how All's values are spelled, for CHECK constraints, completions and tests.
func Spellings[E protoreflect.Enum]() []string {
	all := All[E]()
	out := make([]string, len(all))
	for i, e := range all {
		out[i] = Of(e)
	}
	return out
}

// ValueName spells one value of an enum known only by its descriptor.
func ValueName(v protoreflect.EnumValueDescriptor) string {
	d, ok := v.Parent().(protoreflect.EnumDescriptor)
	if !ok {
		return strings.ToLower(string(v.Name()))
	}
	return spellValue(d, v)
}

func spell(d protoreflect.EnumDescriptor, n protoreflect.EnumNumber) string {
	if s, ok := tableOf(d).spelling[n]; ok {
		return s
	}
	return strconv.Itoa(int(n))
}

// table holds the spellings of one enum, both ways.
type table struct {
	spelling map[protoreflect.EnumNumber]string
	number   map[string]protoreflect.EnumNumber
}

// tables holds the table of each enum descriptor that was asked for. Two descriptors of one name are two enums.
var tables sync.Map //nolint:gochecknoglobals // a cache of constants

// tableOf returns the table of an enum, and makes it at the first call.
func tableOf(d protoreflect.EnumDescriptor) *table {
	if t, ok := tables.Load(d); ok {
		return t.(*table) //nolint:errcheck,forcetypeassert // nothing else is stored
	}
	values := d.Values()
	t := &table{
		spelling: make(map[protoreflect.EnumNumber]string, values.Len()), number: make(map[string]protoreflect.EnumNumber, values.Len()),
	}
	for i := range values.Len() {
		v := values.Get(i)
		text := spellValue(d, v)
		if _, aliased := t.spelling[v.Number()]; !aliased { // the first name of a number counts, as for ByNumber
			t.spelling[v.Number()] = text
		}
		if _, taken := t.number[text]; !taken {
			t.number[text] = v.Number()
		}
	}
	kept, _ := tables.LoadOrStore(d, t)
	return kept.(*table) //nolint:errcheck,forcetypeassert // nothing else is stored
}

func spellValue(d protoreflect.EnumDescriptor, v protoreflect.EnumValueDescriptor) string {
	name := strings.TrimPrefix(string(v.Name()), prefix(d.Name()))
	name = strings.ToLower(name)
	if d.FullName() == taskTypeEnum && v.Number() != 0 {
		for _, noun := range taskNouns {
			if verb, ok := strings.CutPrefix(name, noun+"_"); ok {
				return noun + "." + verb
			}
		}
	}
	return name
}

func parse(d protoreflect.EnumDescriptor, s string) (protoreflect.EnumNumber, error) {
	if n, ok := tableOf(d).number[s]; ok {
		return n, nil
	}
	values := d.Values()
	known := make([]string, 0, values.Len())
	for i := range values.Len() {
		if v := values.Get(i); v.Number() != 0 {
			known = append(known, spellValue(d, v))
		}
	}
	if len(s) > 64 {
		s = s[:64]
	}
	return 0, fmt.Errorf("%q is not a %s: want one of %s", s, d.Name(), strings.Join(known, ", "))
}

// prefix answers the value prefix that buf's rules give an enum: NodeIdentityState -> NODE_IDENTITY_STATE_.
func prefix(name protoreflect.Name) string {
	var b strings.Builder
	for i, r := range string(name) {
		if i > 0 && r >= 'A' && r <= 'Z' {
			b.WriteByte('_')
		}
		b.WriteRune(r)
	}
	return strings.ToUpper(b.String()) + "_"
}
