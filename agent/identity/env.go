package identity

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gpuaas/mesh/internal/bundle"
	"github.com/gpuaas/mesh/internal/config"
)

// Names of the variables in node-agent.env.
const (
	EnvAPIURL         = bundle.EnvAPIURL
	EnvTerminalURL    = bundle.EnvTerminalURL
	EnvRecoveryURL    = bundle.EnvRecoveryURL
	EnvRecoveryBundle = bundle.EnvRecoveryBundle
	EnvToken          = bundle.EnvToken
	EnvTaskKeys       = "GPUAAS_TASK_SIGNING_PUBKEYS"
	EnvTrustDomain    = bundle.EnvTrustDomain
	EnvNodeName       = bundle.EnvNodeName
	EnvInstallUnit    = "GPUAAS_INSTALL_UNIT"
	EnvPackageSource  = "GPUAAS_PACKAGE_SOURCE"
)

const (
	maxEnvSize  = 64 << 10
	maxEnvLines = 512
)

// EnvError reports all problems of node-agent.env. It quotes no values.
type EnvError struct{ Problems error }

// Error lists the problems.
func (e *EnvError) Error() string { return "node-agent.env: " + e.Problems.Error() }

// Unwrap returns the problems.
func (e *EnvError) Unwrap() error { return e.Problems }

// Env is the content of node-agent.env: variables in the order of the file. The token is in it, so it is never logged
// whole.
type Env struct {
	names  []string
	values map[string]string
	// replaced is a recovery token with which an operator's stands in one file: an operator may add a line, and need not
	// change the one that the agent wrote.
	replaced string
	// unread is set where the file has something that cannot be read, which must not be replaced.
	unread bool
}

// ParseEnv reads lines NAME=VALUE. Empty lines and lines that begin with # are skipped; a leading `export` is allowed;
// a value may be in single or double quotes, in which nothing is expanded. No variable may be set twice, except that an
// operator's token may stand beside a recovery token, and is the one that Get returns. All problems are reported at
// once.
func ParseEnv(data []byte) (Env, error) {
	env := Env{values: map[string]string{}}
	if len(data) > maxEnvSize {
		return env, fmt.Errorf("larger than %d bytes", maxEnvSize)
	}
	var problems []error
	lines := strings.Split(string(data), "\n")
	if len(lines) > maxEnvLines {
		return env, fmt.Errorf("more than %d lines", maxEnvLines)
	}
	for i, line := range lines {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		name, value, err := parseLine(line)
		switch {
		case err != nil:
			problems = append(problems, fmt.Errorf("line %d: %w", i+1, err)) // never the line itself: it may be the token
		case name == EnvToken && env.replaced == "" && besides(env.values[EnvToken], value):
			env.values[EnvToken], env.replaced = value, env.values[EnvToken]
			if IsRecoveryToken(value) {
				env.values[EnvToken], env.replaced = env.replaced, value
			}
		case slices.Contains(env.names, name):
			problems = append(problems, fmt.Errorf("line %d: %s is set twice", i+1, name))
		default:
			env.names = append(env.names, name)
			env.values[name] = value
		}
	}
	return env, errors.Join(problems...)
}

// besides reports whether one of two tokens is a recovery token and the other is an operator's.
func besides(former, token string) bool {
	return former != "" && token != "" && IsRecoveryToken(former) != IsRecoveryToken(token)
}

func parseLine(line string) (string, string, error) {
	line = strings.TrimSpace(strings.TrimPrefix(line, "export "))
	name, value, ok := strings.Cut(line, "=")
	if !ok {
		return "", "", errors.New("not NAME=VALUE")
	}
	if !validName(name) {
		return "", "", errors.New("not a variable's name before the =")
	}
	value = strings.TrimSpace(value)
	if value != "" && (value[0] == '\'' || value[0] == '"') {
		if len(value) < 2 || value[len(value)-1] != value[0] {
			return "", "", fmt.Errorf("%s: quote is not closed", name)
		}
		value = value[1 : len(value)-1]
	}
	if strings.ContainsAny(value, "'\"") {
		return "", "", fmt.Errorf("%s: quote inside the value", name)
	}
	for _, r := range value {
		if r < ' ' || r == 0x7f || r == '\uFFFD' {
			return "", "", fmt.Errorf("%s: control character or broken text in the value", name)
		}
	}
	return name, value, nil
}

func validName(name string) bool {
	if name == "" || len(name) > 64 {
		return false
	}
	for i, c := range []byte(name) {
		if (c < 'A' || c > 'Z') && c != '_' && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return true
}

// Get returns a variable, empty if it is not set.
func (e Env) Get(name string) string { return e.values[name] }

// With returns a copy in which name is value; an empty value removes it. ParseEnv refuses values with quotes or control
// characters, so the caller must pass only values that Clean accepts.
func (e Env) With(name, value string) Env {
	out := Env{names: slices.Clone(e.names), values: make(map[string]string, len(e.values)+1), replaced: e.replaced}
	out.unread = e.unread
	maps.Copy(out.values, e.values)
	if name == EnvToken {
		out.replaced = ""
	}
	if value == "" {
		delete(out.values, name)
		out.names = slices.DeleteFunc(out.names, func(n string) bool { return n == name })
		return out
	}
	if !slices.Contains(out.names, name) {
		out.names = append(out.names, name)
	}
	out.values[name] = value
	return out
}

// Clean reports whether the file can have value as a variable's value.
func Clean(value string) bool {
	_, got, err := parseLine("A='" + value + "'")
	return err == nil && got == value
}

// Render returns the content of the file.
func (e Env) Render() []byte {
	var b strings.Builder
	for _, name := range e.names {
		if name == EnvToken && e.replaced != "" {
			b.WriteString(name + "='" + e.replaced + "'\n")
		}
		b.WriteString(name + "='" + e.values[name] + "'\n")
	}
	return []byte(b.String())
}

// Unknown returns the names of the variables that this build does not read.
func (e Env) Unknown() []string {
	known := []string{
		EnvAPIURL, EnvTerminalURL, EnvRecoveryURL, EnvRecoveryBundle, EnvToken, EnvTaskKeys, EnvTrustDomain, EnvNodeName,
		EnvInstallUnit, EnvPackageSource,
	}
	return slices.DeleteFunc(slices.Clone(e.names), func(name string) bool { return slices.Contains(known, name) })
}

// Validate reports everything that would keep an agent from reaching its control plane.
func (e Env) Validate() error {
	var problems []error
	check := func(name string, needed bool) {
		value := e.Get(name)
		if value == "" {
			if needed {
				problems = append(problems, fmt.Errorf("%s is not set", name))
			}
			return
		}
		if _, err := HostPort(value); err != nil {
			problems = append(problems, fmt.Errorf("%s: %w", name, err))
		}
	}
	check(EnvAPIURL, e.Get(EnvRecoveryURL) == "")
	check(EnvTerminalURL, false)
	check(EnvRecoveryURL, false)
	if err := errors.Join(problems...); err != nil {
		return &EnvError{err}
	}
	return nil
}

// RecoveryURL returns the address at which this host enrols: the pinned one, else that of the node API.
func (e Env) RecoveryURL() string {
	return cmp.Or(e.Get(EnvRecoveryURL), e.Get(EnvAPIURL))
}

// HostPort reads an address of the control plane as config.HostPort does.
func HostPort(endpoint string) (string, error) { return config.HostPort(endpoint) }

// RecoveryBundlePath returns the path of the pinned trust for enrolment: the file that the variable names (relative to
// etc), else the default file if it is there, else the bundle for the node API.
func (s *Store) RecoveryBundlePath() string {
	if path := s.Env().Get(EnvRecoveryBundle); path != "" {
		if filepath.IsAbs(path) {
			return path
		}
		return filepath.Join(s.dirs.Etc, path)
	}
	if path := s.path(fileRecoveryBundle); exists(path) {
		return path
	}
	return s.path(fileBundle)
}

// BundlePath returns the path of the trust for the node API.
func (s *Store) BundlePath() string { return s.path(fileBundle) }

// BundleFile returns what BundlePath does for a store whose etc directory is given.
func BundleFile(etc string) string {
	return (&Store{dirs: Dirs{Etc: etc}}).path(fileBundle)
}
