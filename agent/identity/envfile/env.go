// Package envfile reads and writes node-agent.env, the file of variables that tells an agent its control plane.
package envfile

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpuaas/mesh/internal/bundle"
	"github.com/gpuaas/mesh/internal/config"
)

// Names of the variables in node-agent.env.
const (
	APIURL         = bundle.EnvAPIURL
	TerminalURL    = bundle.EnvTerminalURL
	RecoveryURL    = bundle.EnvRecoveryURL
	RecoveryBundle = bundle.EnvRecoveryBundle
	Token          = bundle.EnvToken
	TaskKeys       = "GPUAAS_TASK_SIGNING_PUBKEYS"
	TrustDomain    = bundle.EnvTrustDomain
	NodeName       = bundle.EnvNodeName
	InstallUnit    = "GPUAAS_INSTALL_UNIT"
	PackageSource  = "GPUAAS_PACKAGE_SOURCE"
)

const (
	maxEnvSize  = 64 << 10
	maxEnvLines = 512
)

// Error reports all problems of node-agent.env. It quotes no values.
type Error struct{ Problems error }

// Error lists the problems.
func (e *Error) Error() string { return "node-agent.env: " + e.Problems.Error() }

// Unwrap returns the problems.
func (e *Error) Unwrap() error { return e.Problems }

// Env is the content of node-agent.env: variables in the order of the file. The token is in it, so it is never logged
// whole.
type Env struct {
	names  []string
	values map[string]string
	// Replaced is a recovery token with which an operator's stands in one file: an operator may add a line, and need not
	// change the one that the agent wrote.
	Replaced string
	// Unread is set where the file has something that cannot be read, which must not be replaced.
	Unread bool
}

// Parse reads lines NAME=VALUE. Empty lines and lines that begin with # are skipped; a leading `export` is allowed;
// a value may be in single or double quotes, in which nothing is expanded. No variable may be set twice, except that an
// operator's token may stand beside a recovery token, and is the one that Get returns. All problems are reported at
// once.
func Parse(data []byte) (Env, error) {
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
		case name == Token && env.Replaced == "" && besides(env.values[Token], value):
			env.values[Token], env.Replaced = value, env.values[Token]
			if IsRecoveryToken(value) {
				env.values[Token], env.Replaced = env.Replaced, value
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

// Names returns the names of the variables, in the order of the file.
func (e Env) Names() []string { return slices.Clone(e.names) }

// With returns a copy in which name is value; an empty value removes it. Parse refuses values with quotes or control
// characters, so the caller must pass only values that Clean accepts.
func (e Env) With(name, value string) Env {
	out := Env{names: slices.Clone(e.names), values: make(map[string]string, len(e.values)+1), Replaced: e.Replaced}
	out.Unread = e.Unread
	maps.Copy(out.values, e.values)
	if name == Token {
		out.Replaced = ""
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
		if name == Token && e.Replaced != "" {
			b.WriteString(name + "='" + e.Replaced + "'\n")
		}
		b.WriteString(name + "='" + e.values[name] + "'\n")
	}
	return []byte(b.String())
}

// Unknown returns the names of the variables that this build does not read.
func (e Env) Unknown() []string {
	known := []string{
		APIURL, TerminalURL, RecoveryURL, RecoveryBundle, Token, TaskKeys, TrustDomain, NodeName,
		InstallUnit, PackageSource,
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
	check(APIURL, e.Get(RecoveryURL) == "")
	check(TerminalURL, false)
	check(RecoveryURL, false)
	if err := errors.Join(problems...); err != nil {
		return &Error{err}
	}
	return nil
}

// RecoveryURL returns the address at which this host enrols: the pinned one, else that of the node API.
func (e Env) RecoveryURL() string {
	return cmp.Or(e.Get(RecoveryURL), e.Get(APIURL))
}

// HostPort reads an address of the control plane as config.HostPort does.
func HostPort(endpoint string) (string, error) { return config.HostPort(endpoint) }

// recoveryPrefix begins the text of every recovery token. An agent reads nothing else in it.
const recoveryPrefix = "grt_"

// IsRecoveryToken reports whether a token is one of those that the control plane issues with certificates, and no
// operator's.
func IsRecoveryToken(token string) bool { return strings.HasPrefix(token, recoveryPrefix) }

// RecoveryToken returns the recovery token in env; empty: there is none.
func (e Env) RecoveryToken() string {
	if token := e.Get(Token); IsRecoveryToken(token) {
		return token
	}
	return e.Replaced
}

// Reaches reports whether the variables name a control plane.
func (e Env) Reaches() bool { return e.Validate() == nil }
