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
	if name, ok := spellingsOf(d).byNumber[n]; ok {
		return name
	}
	return strconv.Itoa(int(n))
}

// spellings are those of one enum.
type spellings struct {
	byNumber map[protoreflect.EnumNumber]string
	byName   map[string]protoreflect.EnumNumber
	known    []string // all but the unspecified value's, in the order of the declaration
}

// spelled holds the spellings of the enums that were asked for, by descriptor. Enums are spelled with every row and event: it is done once.
var spelled sync.Map //nolint:gochecknoglobals // what is constant

func spellingsOf(d protoreflect.EnumDescriptor) *spellings {
	if found, ok := spelled.Load(d); ok {
		if s, ok := found.(*spellings); ok {
			return s
		}
	}
	values := d.Values()
	s := &spellings{byNumber: make(map[protoreflect.EnumNumber]string, values.Len()), byName: make(map[string]protoreflect.EnumNumber, values.Len())}
	for i := range values.Len() {
		v := values.Get(i)
		name := spellValue(d, v)
		if _, ok := s.byNumber[v.Number()]; !ok { // of aliases the first counts
			s.byNumber[v.Number()] = name
		}
		if _, ok := s.byName[name]; !ok {
			s.byName[name] = v.Number()
		}
		if v.Number() != 0 {
			s.known = append(s.known, name)
		}
	}
	spelled.Store(d, s)
	return s
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
	of := spellingsOf(d)
	if n, ok := of.byName[s]; ok {
		return n, nil
	}
	if len(s) > 64 {
		s = s[:64]
	}
	return 0, fmt.Errorf("%q is not a %s: want one of %s", s, d.Name(), strings.Join(of.known, ", "))
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
