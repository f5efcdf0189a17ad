package names

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"

	"google.golang.org/protobuf/reflect/protoreflect"
)

const taskTypeEnum protoreflect.FullName = "gpuaas.common.v1.TaskType"

// taskNouns are the objects that tasks act on; the dot of a task type follows one of them.
var taskNouns = []string{
	"probe", "workload", "storage", "terminal", "node", "recovery_token", "verifier",
	"diagnostics",
}

// Of returns the spelling of an enum value: its name without the enum's prefix, lower case. A number that the enum does
// not declare is spelled as the number.
func Of(e protoreflect.Enum) string {
	return spell(e.Descriptor(), e.Number())
}

// Parse returns the value that Of spells as s. For any other text it returns an *UnknownError.
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

// All returns every declared value but the unspecified one, in the order of the declaration.
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

// Spellings returns the spellings that Parse accepts, without that of the unspecified value.
func Spellings[E protoreflect.Enum]() []string {
	var zero E
	return slices.Clone(tableOf(zero.Descriptor()).known)
}

// ValueName returns the spelling of one value of an enum known only by its descriptor.
func ValueName(v protoreflect.EnumValueDescriptor) string {
	d, ok := v.Parent().(protoreflect.EnumDescriptor)
	if !ok {
		return strings.ToLower(string(v.Name()))
	}
	return spell(d, v.Number())
}

// UnknownError reports a spelling that is none of an enum's: it may be a value of a newer build.
type UnknownError struct {
	Enum  string
	Value string // 64 bytes of it at most
	Known []string
}

// Error returns a text that names the enum and the spellings that exist.
func (e *UnknownError) Error() string {
	return fmt.Sprintf("%q is not a %s: want one of %s", e.Value, e.Enum, strings.Join(e.Known, ", "))
}

// table holds the spellings of one enum.
type table struct {
	byNumber map[protoreflect.EnumNumber]string
	byName   map[string]protoreflect.EnumNumber
	known    []string // without that of the unspecified value
}

// tables are made once for each enum, by its full name.
var tables sync.Map

func tableOf(d protoreflect.EnumDescriptor) *table {
	if t, ok := tables.Load(d.FullName()); ok {
		return t.(*table)
	}
	t, _ := tables.LoadOrStore(d.FullName(), newTable(d))
	return t.(*table)
}

func newTable(d protoreflect.EnumDescriptor) *table {
	values := d.Values()
	t := &table{
		byNumber: make(map[protoreflect.EnumNumber]string, values.Len()),
		byName:   make(map[string]protoreflect.EnumNumber, values.Len()),
		known:    make([]string, 0, values.Len()),
	}
	for i := range values.Len() {
		v := values.Get(i)
		name := spellValue(d, v)
		t.byName[name] = v.Number()
		if _, alias := t.byNumber[v.Number()]; !alias {
			t.byNumber[v.Number()] = name
		}
		if v.Number() != 0 {
			t.known = append(t.known, name)
		}
	}
	return t
}

// Without removes a value from those that Parse accepts and Spellings returns, as if this build were older than the
// value, until restore is called. Of still spells the value. It is for tests of readers.
func Without(e protoreflect.Enum) (restore func()) { //nolint:nonamedreturns // says what it is
	d := e.Descriptor()
	whole, name := tableOf(d), Of(e)
	less := &table{byNumber: whole.byNumber, byName: maps.Clone(whole.byName)}
	delete(less.byName, name)
	less.known = slices.DeleteFunc(slices.Clone(whole.known), func(known string) bool { return known == name })
	tables.Store(d.FullName(), less)
	return func() { tables.Store(d.FullName(), whole) }
}

func spell(d protoreflect.EnumDescriptor, n protoreflect.EnumNumber) string {
	if name, ok := tableOf(d).byNumber[n]; ok {
		return name
	}
	return strconv.Itoa(int(n))
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
	t := tableOf(d)
	if n, ok := t.byName[s]; ok {
		return n, nil
	}
	return 0, &UnknownError{Enum: string(d.Name()), Value: s[:min(len(s), 64)], Known: t.known}
}

// prefix returns the value prefix that buf's rules give an enum: NodeIdentityState -> NODE_IDENTITY_STATE_.
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
