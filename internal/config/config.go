// Package config reads the configuration of a process into a typed struct.
//
// It owns the layers (flags over environment over file over defaults) and the report of the problems in them. It
// accepts only the keys that the struct declares: any other key is an error, in the file and in the environment. It
// never holds a secret: secrets are paths of files (SecretFile), read when they are needed.
//
// Guarantees: every problem is reported at once, each with its place; if a value cannot be read, the default stays, so
// that it cannot cause a second, false report.
//
// Keys are the `koanf` tags of the struct's fields joined by dots, or the field's name in snake_case; a tag of "-"
// leaves a field out. In the environment a key is upper case with underscores behind the prefix: `database.pool_size`
// is GPUAAS_LIFECYCLE_DATABASE_POOL_SIZE.
package config

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/knadh/koanf/parsers/yaml"
	"github.com/knadh/koanf/providers/confmap"
	"github.com/knadh/koanf/v2"
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

func load(target any, opts LoadOptions) []Problem {
	schema, problems := schemaOf(target)
	if len(problems) > 0 {
		return problems
	}
	where := map[string]string{}
	file, fileProblems := readFile(opts.File, schema, where)
	env, envProblems := readEnv(opts, schema, where)
	flags, flagProblems := readOverrides(opts.Overrides, schema, where)
	problems = slices.Concat(fileProblems, envProblems, flagProblems)

	layers := koanf.New(".")
	for _, layer := range []map[string]any{file, env, flags} {
		if err := layers.Load(confmap.Provider(layer, "."), nil); err != nil {
			problems = append(problems, Problem{Message: err.Error()})
		}
	}
	for _, f := range schema.fields {
		if !layers.Exists(f.key) {
			continue
		}
		for _, message := range f.decode(layers.Get(f.key)) {
			problems = append(problems, Problem{Where: where[f.key], Key: f.key, Message: message})
		}
	}
	return append(problems, validate(schema)...)
}

// readFile returns the file's values by key. Each key that the schema does not have is a problem and is left out.
func readFile(path string, schema *schema, where map[string]string) (map[string]any, []Problem) {
	if path == "" {
		return nil, nil
	}
	raw, err := os.ReadFile(path) // the operator names the file
	if err != nil {
		return nil, []Problem{{Where: path, Message: "read file: " + err.Error()}}
	}
	lines, problems := scanYAML(path, raw, schema)
	if lines == nil {
		return nil, problems
	}
	tree, err := yaml.Parser().Unmarshal(raw)
	if err != nil {
		return nil, append(problems, Problem{Where: path, Message: err.Error()})
	}
	file := koanf.New(".")
	if err := file.Load(confmap.Provider(tree, ""), nil); err != nil {
		return nil, append(problems, Problem{Where: path, Message: err.Error()})
	}
	values := map[string]any{}
	for _, f := range schema.fields {
		line, given := lines[f.key]
		if !given {
			continue
		}
		value := file.Get(f.key)
		if value == nil {
			problems = append(problems, Problem{Where: fmt.Sprintf("%s:%d", path, line), Key: f.key, Message: "has no value"})
			continue
		}
		values[f.key] = value
		where[f.key] = fmt.Sprintf("%s:%d", path, line)
	}
	return values, problems
}

func readEnv(opts LoadOptions, schema *schema, where map[string]string) (map[string]any, []Problem) {
	if opts.EnvPrefix == "" {
		return nil, nil
	}
	environ := opts.Environ
	if environ == nil {
		environ = os.Environ()
	}
	values := map[string]any{}
	var problems []Problem
	for _, pair := range environ {
		name, text, _ := strings.Cut(pair, "=")
		suffix, ours := strings.CutPrefix(name, opts.EnvPrefix)
		if !ours {
			continue
		}
		f := schema.byEnv[suffix]
		switch {
		case f != nil:
			value, err := f.parse(text)
			if err != nil {
				problems = append(problems, Problem{Where: name, Key: f.key, Message: err.Error()})
				continue
			}
			values[f.key] = value
			where[f.key] = name
		case serviceLink.MatchString(suffix):
		default:
			problems = append(problems, Problem{Where: name, Message: "unknown key" + schema.suggestEnv(suffix, opts.EnvPrefix)})
		}
	}
	return values, problems
}

func readOverrides(overrides map[string]string, schema *schema, where map[string]string) (map[string]any, []Problem) {
	values := map[string]any{}
	var problems []Problem
	for key, text := range overrides {
		f := schema.byKey[key]
		if f == nil {
			problems = append(problems, Problem{Where: "flag", Key: key, Message: "unknown key" + schema.suggest(key)})
			continue
		}
		value, err := f.parse(text)
		if err != nil {
			problems = append(problems, Problem{Where: "flag", Key: key, Message: err.Error()})
			continue
		}
		values[key] = value
		where[key] = "flag"
	}
	slices.SortFunc(problems, func(a, b Problem) int { return strings.Compare(a.Key, b.Key) })
	return values, problems
}
