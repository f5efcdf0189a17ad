// Package config reads the configuration of a process into a typed struct.
//
// It owns the layers (flags over environment over file over defaults) and the report of the problems in them. It
// accepts only the keys that the struct declares: any other key is an error, in the file and in the environment. It
// never holds a secret: secrets are paths of files (SecretFile), read when they are needed.
//
// Guarantees: every problem is reported at once, each with its place; if a value cannot be read, that of the layer
// below stays, so that it cannot cause a second, false report.
//
// A file is YAML. The text of a variable or a flag is taken as it is, the items of a list are separated by commas, and
// numbers are written as in YAML, so that 010 is eight. Keys are the `yaml` tags of the struct's fields joined by dots;
// a tag of "-" leaves a field out. In the environment a key is upper case with underscores behind the prefix:
// `database.pool_size` is GPUAAS_LIFECYCLE_DATABASE_POOL_SIZE.
package config

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Validator is a configuration, or a section of one, that can check itself. Load calls Validate of every section, so a
// section that contains others checks only rules about several of them.
type Validator interface{ Validate() error }

// LoadOptions names the sources of the values.
type LoadOptions struct {
	File      string            // YAML; empty: none
	EnvPrefix string            // such as GPUAAS_LIFECYCLE_; empty: the environment is not read
	Environ   []string          // NAME=value; nil: the process's
	Overrides map[string]string // by key; the values of flags
}

// Problem is one thing that is wrong.
type Problem struct { //nolint:errname // a problem is reported in lists; that it is an error is for errors.Join
	Where   string // file:line, the variable, the flag, or empty for a rule about the whole
	Key     string
	Message string
}

func (p Problem) Error() string {
	var parts []string
	for _, s := range []string{p.Where, p.Key, p.Message} {
		if s != "" {
			parts = append(parts, s)
		}
	}
	return strings.Join(parts, ": ")
}

// Load reads the layers over the given defaults and validates the result. The error joins every Problem.
func Load[T any](defaults T, opts LoadOptions) (T, error) {
	out := defaults
	var errs []error
	for _, p := range load(&out, opts) {
		errs = append(errs, p)
	}
	if len(errs) > 0 {
		return defaults, fmt.Errorf("configuration: %w", errors.Join(errs...))
	}
	return out, nil
}

// Check returns the problems of a file alone, for a configuration with these defaults; an empty result means that it
// would load.
func Check[T any](defaults T, file string) []Problem {
	return load(&defaults, LoadOptions{File: file})
}

// Problems returns the problems joined in an error of Load.
func Problems(err error) []Problem {
	if err == nil {
		return nil
	}
	if p, ok := err.(Problem); ok { //nolint:errorlint // the walk below looks at each link
		return []Problem{p}
	}
	switch e := err.(type) { //nolint:errorlint // the walk looks at each link
	case interface{ Unwrap() []error }:
		var out []Problem
		for _, inner := range e.Unwrap() {
			out = append(out, Problems(inner)...)
		}
		return out
	default:
		return Problems(errors.Unwrap(err))
	}
}

// Marshal returns a configuration as the YAML that Load reads back to the same value, with every key, in the order of
// the struct.
func Marshal[T any](c T) ([]byte, error) {
	raw, err := yaml.Marshal(c)
	if err != nil {
		return nil, fmt.Errorf("marshal configuration: %w", err)
	}
	return raw, nil
}

// given is the value of a key in one of the layers.
type given struct {
	where string
	field *field
	value *yaml.Node
}

func load(target any, opts LoadOptions) []Problem {
	schema, problems := schemaOf(target)
	if len(problems) > 0 {
		return problems
	}
	file, fileProblems := readFile(opts.File, schema)
	env, envProblems := readEnv(opts, schema)
	flags, flagProblems := readOverrides(opts.Overrides, schema)
	problems = slices.Concat(fileProblems, envProblems, flagProblems)
	for _, g := range slices.Concat(file, env, flags) { // the last value of a key stays
		for _, message := range g.field.decode(g.value) {
			problems = append(problems, Problem{Where: g.where, Key: g.field.key, Message: message})
		}
	}
	return append(problems, validate(schema)...)
}

// readFile returns the file's values. Each key that the schema does not have, that is given twice, or that is a section
// and has a value instead is a problem and is left out.
func readFile(path string, s *schema) ([]given, []Problem) {
	if path == "" {
		return nil, nil
	}
	raw, err := os.ReadFile(path) // the operator names the file
	if err != nil {
		return nil, []Problem{{Where: path, Message: "read file: " + err.Error()}}
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(raw, &doc); err != nil {
		return nil, []Problem{{Where: path, Message: err.Error()}}
	}
	if len(doc.Content) == 0 || doc.Content[0].Tag == "!!null" {
		return nil, nil
	}
	root := doc.Content[0]
	if root.Kind != yaml.MappingNode {
		return nil, []Problem{{Where: fmt.Sprintf("%s:%d", path, root.Line), Message: "want keys and values"}}
	}
	var values []given
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
				values = append(values, given{where: where, field: s.byKey[key], value: value})
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
	return values, problems
}

func readEnv(opts LoadOptions, s *schema) ([]given, []Problem) {
	if opts.EnvPrefix == "" {
		return nil, nil
	}
	environ := opts.Environ
	if environ == nil {
		environ = os.Environ()
	}
	var values []given
	var problems []Problem
	for _, pair := range environ {
		name, text, _ := strings.Cut(pair, "=")
		suffix, ours := strings.CutPrefix(name, opts.EnvPrefix)
		f := s.byEnv[suffix]
		switch {
		case !ours || f == nil && serviceLink.MatchString(suffix):
		case f == nil:
			problems = append(problems, Problem{Where: name, Message: "unknown key" + s.suggestEnv(suffix, opts.EnvPrefix)})
		default:
			values = append(values, given{where: name, field: f, value: ofText(f.value.Type(), text)})
		}
	}
	return values, problems
}

func readOverrides(overrides map[string]string, s *schema) ([]given, []Problem) {
	var values []given
	var problems []Problem
	for _, key := range slices.Sorted(maps.Keys(overrides)) {
		f := s.byKey[key]
		if f == nil {
			problems = append(problems, Problem{Where: "flag", Key: key, Message: "unknown key" + s.suggest(key)})
			continue
		}
		values = append(values, given{where: "flag", field: f, value: ofText(f.value.Type(), overrides[key])})
	}
	return values, problems
}
