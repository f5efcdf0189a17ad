package config

import (
	"cmp"
	"encoding"
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

var (
	durationType = reflect.TypeFor[time.Duration]()
	secretType   = reflect.TypeFor[Secret]()
	textType     = reflect.TypeFor[encoding.TextUnmarshaler]()
	validType    = reflect.TypeFor[Validator]()
)

// serviceLink matches the variables that Kubernetes adds for a service that has the name of one of ours; they are not
// configuration.
var serviceLink = regexp.MustCompile(`^(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT|PORT_\d+_(TCP|UDP)(_[A-Z]+)?)$`)

// field is one leaf of a configuration.
type field struct {
	key   string
	value reflect.Value // settable
}

type section struct {
	key   string
	value reflect.Value
}

// schema holds the keys that a configuration struct declares.
type schema struct {
	fields   []*field
	sections []section
	byKey    map[string]*field
	byEnv    map[string]*field
}

func schemaOf(target any) (*schema, []Problem) {
	v := reflect.ValueOf(target).Elem()
	s := &schema{byKey: map[string]*field{}, byEnv: map[string]*field{}}
	if v.Kind() != reflect.Struct {
		return nil, []Problem{{Message: fmt.Sprintf("a configuration is a struct, not %s", v.Type())}}
	}
	problems := s.walk("", v)
	for _, f := range s.fields {
		s.byKey[f.key] = f
		env := envName(f.key)
		if other := s.byEnv[env]; other != nil {
			problems = append(problems, Problem{Key: f.key, Message: "has the same name in the environment as " + other.key})
		}
		s.byEnv[env] = f
	}
	return s, problems
}

func (s *schema) walk(prefix string, v reflect.Value) []Problem {
	s.sections = append(s.sections, section{key: strings.TrimSuffix(prefix, "."), value: v})
	var problems []Problem
	for i := range v.NumField() {
		sf := v.Type().Field(i)
		if !sf.IsExported() {
			continue
		}
		name := keyOf(sf)
		if name == "-" {
			continue
		}
		fv := v.Field(i)
		key := prefix + name
		switch {
		case sf.Type == secretType:
			problems = append(problems, Problem{Key: key, Message: "a secret is configured by the path of its file"})
		case isSection(sf.Type) && strings.HasSuffix(sf.Tag.Get("yaml"), ",inline"):
			problems = append(problems, s.walk(prefix, fv)...)
		case isSection(sf.Type):
			problems = append(problems, s.walk(key+".", fv)...)
		default:
			s.fields = append(s.fields, &field{key: key, value: fv})
		}
	}
	return problems
}

// keyOf returns the key of a field, as the yaml package has it.
func keyOf(sf reflect.StructField) string {
	name, _, _ := strings.Cut(sf.Tag.Get("yaml"), ",")
	return cmp.Or(name, strings.ToLower(sf.Name))
}

// isSection reports whether a type is a struct whose fields are keys of their own, and not a value with a text form.
func isSection(t reflect.Type) bool {
	return t.Kind() == reflect.Struct && !reflect.PointerTo(t).Implements(textType)
}

// decode sets the field and returns the problems of the value; on a problem the field keeps its previous value.
func (f *field) decode(node *yaml.Node) []string {
	t := f.value.Type()
	switch {
	case node.ShortTag() == "!!null":
		return []string{"has no value"}
	case t.Kind() == reflect.Map && node.Line == 0:
		return []string{"can be given in the file only"}
	}
	fresh := reflect.New(t)
	problems := accepted(t, node)
	if err := node.Decode(fresh.Interface()); err != nil {
		problems = append(problems, f.messages(err)...)
	}
	if len(problems) == 0 {
		f.value.Set(fresh.Elem())
	}
	for i, text := range problems {
		problems[i] = strings.TrimPrefix(text, fmt.Sprintf("line %d: ", node.Line))
	}
	return problems
}

// accepted returns a problem for each part of a value that the decoder accepts and a configuration does not: a key that
// the struct does not have, and a fraction, which it would cut off to a whole number.
func accepted(t reflect.Type, node *yaml.Node) []string {
	if node.Alias != nil {
		node = node.Alias
	}
	var problems []string
	if t.Kind() >= reflect.Int && t.Kind() <= reflect.Uint64 && t != durationType && node.ShortTag() == "!!float" {
		problems = append(problems, fmt.Sprintf("line %d: `%s`: want a whole number", node.Line, node.Value))
	}
	var fields []reflect.StructField
	if isSection(t) {
		fields = reflect.VisibleFields(t)
	}
	for i, value := range node.Content {
		switch {
		case t.Kind() == reflect.Slice && node.Kind == yaml.SequenceNode, t.Kind() == reflect.Map && i%2 == 1:
			problems = append(problems, accepted(t.Elem(), value)...)
		case isSection(t) && i%2 == 0 && node.Kind == yaml.MappingNode:
			at := slices.IndexFunc(fields, func(sf reflect.StructField) bool { return keyOf(sf) == value.Value })
			if at < 0 {
				problems = append(problems, fmt.Sprintf("line %d: unknown key %s", value.Line, value.Value))
				continue
			}
			problems = append(problems, accepted(fields[at].Type, node.Content[i+1])...)
		}
	}
	return problems
}

// refusal matches what the decoder says of a value of another type.
var refusal = regexp.MustCompile("^(line \\d+: )cannot unmarshal !!\\w+(?: (`.*`))? into (.*)$")

// messages returns the decoder's report as one plain sentence for each value.
func (f *field) messages(err error) []string {
	wrong, ok := errors.AsType[*yaml.TypeError](err)
	if !ok {
		return []string{err.Error()}
	}
	for i, text := range wrong.Errors {
		if m := refusal.FindStringSubmatch(text); m != nil {
			wrong.Errors[i] = m[1] + strings.TrimPrefix(m[2]+": "+f.wants(m[3]), ": ")
		}
	}
	return wrong.Errors
}

// wants returns what a value of a type may be; the type is given by its name, as the decoder reports it.
func (f *field) wants(name string) string {
	switch t := f.value.Type(); {
	case name == durationType.String():
		return "a duration needs its unit, such as 90s or 5m"
	case name == t.String():
		name = t.Kind().String()
	}
	switch {
	case name == "int":
		return "want a whole number"
	case strings.HasPrefix(name, "int"), strings.HasPrefix(name, "uint"):
		return "want a whole number that fits " + name
	case strings.HasPrefix(name, "float"):
		return "want a number"
	case name == "bool":
		return "want true or false"
	case name == "string":
		return "want text"
	case name == "slice", strings.HasPrefix(name, "[]"):
		return "want a list"
	default:
		return "want keys and values"
	}
}

// ofText returns the text of a variable or a flag as a file would have the value of a type: items of a list are
// separated by commas.
func ofText(t reflect.Type, text string) *yaml.Node {
	switch {
	case t == durationType, t.Kind() == reflect.String, reflect.PointerTo(t).Implements(textType):
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: text}
	case t.Kind() == reflect.Slice:
		list := &yaml.Node{Kind: yaml.SequenceNode}
		for part := range strings.SplitSeq(text, ",") {
			list.Content = append(list.Content, ofText(t.Elem(), strings.TrimSpace(part)))
		}
		if text == "" {
			list.Content = nil
		}
		return list
	case t.Kind() == reflect.Bool:
		if b, err := strconv.ParseBool(text); err == nil {
			text = strconv.FormatBool(b)
		}
	}
	return &yaml.Node{Kind: yaml.ScalarNode, Value: text}
}

func (s *schema) isSection(key string) bool {
	return slices.ContainsFunc(s.sections, func(sec section) bool { return sec.key == key && key != "" })
}

// suggest returns a hint with the known key that is nearest in spelling, if one is near.
func (s *schema) suggest(key string) string {
	best, distance := "", 4
	for known := range s.byKey {
		if d := editDistance(key, known); d < distance || (d == distance && known < best) {
			best, distance = known, d
		}
	}
	if best == "" {
		return ""
	}
	return ": did you mean " + best + "?"
}

func (s *schema) suggestEnv(suffix, prefix string) string {
	best, distance := "", 4
	for known := range s.byEnv {
		if d := editDistance(suffix, known); d < distance || (d == distance && known < best) {
			best, distance = known, d
		}
	}
	if best == "" {
		return ""
	}
	return ": did you mean " + prefix + best + "?"
}

// validate calls Validate of every section, the innermost first, and of the whole at the end.
func validate(s *schema) []Problem {
	var problems []Problem
	for _, sec := range slices.Backward(s.sections) {
		var v Validator
		switch {
		case sec.value.Type().Implements(validType):
			v, _ = sec.value.Interface().(Validator)
		case sec.value.CanAddr() && sec.value.Addr().Type().Implements(validType):
			v, _ = sec.value.Addr().Interface().(Validator)
		}
		if v == nil {
			continue
		}
		for _, err := range flatten(v.Validate()) {
			problems = append(problems, Problem{Key: sec.key, Message: err.Error()})
		}
	}
	return problems
}

func flatten(err error) []error {
	if err == nil {
		return nil
	}
	if many, ok := err.(interface{ Unwrap() []error }); ok { // only the outermost join is taken apart
		var out []error
		for _, inner := range many.Unwrap() {
			out = append(out, flatten(inner)...)
		}
		return out
	}
	return []error{err}
}

func envName(key string) string {
	return strings.ToUpper(strings.NewReplacer(".", "_", "-", "_").Replace(key))
}

func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		diagonal := row[0]
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := diagonal
			if a[i-1] != b[j-1] {
				cost++
			}
			diagonal = row[j]
			row[j] = min(cost, row[j]+1, row[j-1]+1)
		}
	}
	return row[len(b)]
}
