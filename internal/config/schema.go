package config

import (
	"encoding"
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/go-viper/mapstructure/v2"
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
		name := sf.Tag.Get("koanf")
		if name == "-" {
			continue
		}
		fv := v.Field(i)
		name, options, _ := strings.Cut(name, ",")
		if name == "" {
			name = snake(sf.Name)
		}
		key := prefix + name
		switch {
		case sf.Type == secretType:
			problems = append(problems, Problem{Key: key, Message: "a secret is configured by the path of its file"})
		case isSection(sf.Type) && (sf.Anonymous || options == "squash"):
			problems = append(problems, s.walk(prefix, fv)...)
		case isSection(sf.Type):
			problems = append(problems, s.walk(key+".", fv)...)
		default:
			s.fields = append(s.fields, &field{key: key, value: fv})
		}
	}
	return problems
}

// isSection reports whether a type is a struct whose fields are keys of their own, and not a value with a text form.
func isSection(t reflect.Type) bool {
	return t.Kind() == reflect.Struct && !reflect.PointerTo(t).Implements(textType)
}

// decode sets the field and returns the problems of the value; on a problem the field keeps its previous value.
func (f *field) decode(value any) []string {
	fresh := reflect.New(f.value.Type())
	decoder, err := mapstructure.NewDecoder(&mapstructure.DecoderConfig{
		Result: fresh.Interface(), TagName: "koanf", ErrorUnused: true,
		MatchName: func(mapKey, fieldName string) bool { return mapKey == fieldName || mapKey == snake(fieldName) },
		DecodeHook: mapstructure.ComposeDecodeHookFunc(
			durationHook, mapstructure.TextUnmarshallerHookFunc(),
		),
	})
	if err != nil {
		return []string{err.Error()}
	}
	if err := decoder.Decode(value); err != nil {
		return messages(err, f.value.Type())
	}
	f.value.Set(fresh.Elem())
	return nil
}

func durationHook(_, to reflect.Type, data any) (any, error) {
	if to != durationType {
		return data, nil
	}
	s, ok := data.(string)
	if !ok {
		if d, isDuration := data.(time.Duration); isDuration {
			return d, nil
		}
		return nil, errors.New("a duration needs its unit, such as 90s or 5m")
	}
	d, err := time.ParseDuration(s)
	if err != nil {
		return nil, fmt.Errorf("%q is not a duration such as 90s or 5m", s)
	}
	return d, nil
}

// messages turns the decoder's joined report into one plain sentence each.
func messages(err error, want reflect.Type) []string {
	var out []string
	var walk func(error)
	walk = func(e error) {
		if many, ok := e.(interface{ Unwrap() []error }); ok { // this is the walk
			for _, inner := range many.Unwrap() {
				walk(inner)
			}
			return
		}
		text := strings.TrimPrefix(e.Error(), "decoding failed due to the following error(s):")
		for line := range strings.SplitSeq(text, "\n") {
			line = strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(line), "* "))
			line = strings.TrimPrefix(line, "'' ")
			line = strings.TrimPrefix(line, "error decoding '': ")
			if line != "" {
				out = append(out, line)
			}
		}
	}
	walk(err)
	if len(out) == 0 {
		out = []string{"is not a " + want.String()}
	}
	return out
}

// parse returns the text of a variable or a flag as a value of the field's type.
func (f *field) parse(text string) (any, error) {
	t := f.value.Type()
	if t == durationType || reflect.PointerTo(t).Implements(textType) {
		return text, nil
	}
	switch t.Kind() { // the rest has no text form
	case reflect.String:
		return text, nil
	case reflect.Bool:
		b, err := strconv.ParseBool(text)
		if err != nil {
			return nil, fmt.Errorf("%q is not true or false", text)
		}
		return b, nil
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		n, err := strconv.ParseInt(text, 10, t.Bits())
		if err != nil {
			return nil, fmt.Errorf("%q is not a number of the range", text)
		}
		return n, nil
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		n, err := strconv.ParseUint(text, 10, t.Bits())
		if err != nil {
			return nil, fmt.Errorf("%q is not a number of the range", text)
		}
		return n, nil
	case reflect.Float32, reflect.Float64:
		n, err := strconv.ParseFloat(text, t.Bits())
		if err != nil {
			return nil, fmt.Errorf("%q is not a number", text)
		}
		return n, nil
	case reflect.Slice:
		if text == "" {
			return []any{}, nil
		}
		var items []any
		element := &field{key: f.key, value: reflect.New(t.Elem()).Elem()}
		for part := range strings.SplitSeq(text, ",") {
			item, err := element.parse(strings.TrimSpace(part))
			if err != nil {
				return nil, err
			}
			items = append(items, item)
		}
		return items, nil
	default:
		return nil, errors.New("can be given in the file only")
	}
}

// scanYAML returns the line of each known key and a problem for each key that is unknown, given twice, or a section
// where a value is expected. The lines are nil if the text is not YAML.
func scanYAML(path string, raw []byte, s *schema) (map[string]int, []Problem) {
	var doc yaml.Node
	if err := yaml.Unmarshal(raw, &doc); err != nil {
		return nil, []Problem{{Where: path, Message: err.Error()}}
	}
	lines := map[string]int{}
	if len(doc.Content) == 0 {
		return lines, nil
	}
	root := doc.Content[0]
	if root.Kind != yaml.MappingNode {
		if root.Tag == "!!null" {
			return lines, nil
		}
		return nil, []Problem{{Where: fmt.Sprintf("%s:%d", path, root.Line), Message: "want keys and values"}}
	}
	var problems []Problem
	var walk func(prefix string, node *yaml.Node)
	walk = func(prefix string, node *yaml.Node) {
		seen := map[string]bool{}
		for i := 0; i+1 < len(node.Content); i += 2 {
			name, value := node.Content[i], node.Content[i+1]
			key := prefix + name.Value
			where := fmt.Sprintf("%s:%d", path, name.Line)
			switch {
			case seen[key]:
				problems = append(problems, Problem{Where: where, Key: key, Message: "stands twice"})
			case s.byKey[key] != nil:
				lines[key] = name.Line
			case s.isSection(key) && value.Kind == yaml.MappingNode:
				walk(key+".", value)
			case s.isSection(key) && value.Tag == "!!null":
			case s.isSection(key):
				problems = append(problems, Problem{Where: where, Key: key, Message: "is a section: want keys and values below it"})
			default:
				problems = append(problems, Problem{Where: where, Key: key, Message: "unknown key" + s.suggest(key)})
			}
			seen[key] = true
		}
	}
	walk("", root)
	return lines, problems
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

// snake returns a Go field name as a key: HTTPAddr -> http_addr, PoolSize -> pool_size.
func snake(name string) string {
	var b strings.Builder
	runes := []rune(name)
	for i, r := range runes {
		if unicode.IsUpper(r) {
			afterLower := i > 0 && !unicode.IsUpper(runes[i-1])
			beforeLower := i > 0 && i+1 < len(runes) && unicode.IsLower(runes[i+1])
			if afterLower || beforeLower {
				b.WriteByte('_')
			}
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
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
