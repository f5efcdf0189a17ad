package workrules_test

import (
	"strings"
	"testing"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/workrules"
)

func TestCheck(t *testing.T) {
	t.Parallel()
	many := make([]string, workrules.MaxArguments)
	for i := range many {
		many[i] = "x"
	}
	env := func(name, value string) *nodev1.Workload {
		return &nodev1.Workload{
			Command: []string{"sleep"}, Ports: []*nodev1.Port{{Name: "http-api"}},
			Env: map[string]string{name: value},
		}
	}
	for _, tc := range []struct {
		name  string
		in    *nodev1.Workload
		field string // empty: nothing is wrong
		text  string
		kind  workrules.Kind
	}{
		{name: "plain", in: env("_Plain9", "a value\nof two lines")},
		{name: "longest name", in: env(strings.Repeat("A", workrules.MaxName), "x")},
		{name: "an image alone", in: &nodev1.Workload{Image: "registry/x"}},
		{name: "PORT without ports", in: &nodev1.Workload{Command: []string{"x"}, Env: map[string]string{"PORT": "80"}}},
		{name: "empty name", in: env("", "x"), field: "env", text: "without a name", kind: workrules.Malformed},
		{name: "digit first", in: env("9A", "x"), field: `env["9A"]`, text: "malformed", kind: workrules.Malformed},
		{name: "equals sign", in: env("A=B", "x"), field: `env["A=B"]`, text: "malformed", kind: workrules.Malformed},
		{name: "not ASCII", in: env("Ä", "x"), field: `env["\u00c4"]`, text: "malformed", kind: workrules.Malformed},
		{name: "NUL in a name", in: env("A\x00", "x"), field: `env["A\x00"]`, text: "malformed", kind: workrules.Malformed},
		{
			name: "name too long", in: env(strings.Repeat("A", workrules.MaxName+1), "x"), field: "env.AAAA",
			text: "name of 257 bytes", kind: workrules.TooLong,
		},
		{name: "loader", in: env("LD_PRELOAD", "x"), field: "env.LD_PRELOAD", text: "forbidden", kind: workrules.Forbidden},
		{
			name: "mark of a run", in: env(workrules.RunVariable, "x"), field: "env.GPUAAS_WORKLOAD_RUN", text: "forbidden",
			kind: workrules.Forbidden,
		},
		{
			name: "devices", in: env("CUDA_VISIBLE_DEVICES", "0"), field: "env.CUDA_VISIBLE_DEVICES", text: "forbidden",
			kind: workrules.Forbidden,
		},
		{
			name: "platform", in: env("GPUAAS_EPOCH", "1"), field: "env.GPUAAS_EPOCH", text: "reserved",
			kind: workrules.Reserved,
		},
		{
			name: "database", in: env("DATABASE_URL", "x"), field: "env.DATABASE_URL", text: "reserved",
			kind: workrules.Reserved,
		},
		{name: "port", in: env("PORT_HTTP_API", "1"), field: "env.PORT_HTTP_API", text: "reserved", kind: workrules.Reserved},
		{name: "NUL in a value", in: env("A", "\x00"), field: "env.A", text: "NUL", kind: workrules.Malformed},
		{
			name: "value too long", in: env("A", strings.Repeat("x", workrules.MaxValue+1)), field: "env.A",
			text: "more than 32768", kind: workrules.TooLong,
		},
		{name: "no command", in: &nodev1.Workload{}, field: "command", text: "is empty", kind: workrules.Malformed},
		{
			name: "blank command", in: &nodev1.Workload{Command: []string{" "}}, field: "command[0]", text: "names no program",
			kind: workrules.Malformed,
		},
		{
			name: "NUL in args", in: &nodev1.Workload{Command: []string{"a"}, Args: []string{"b", "c\x00"}}, field: "args[1]",
			text: "NUL", kind: workrules.Malformed,
		},
		{
			name: "too many words", in: &nodev1.Workload{Command: []string{"a"}, Args: many}, field: "command and args",
			text: "513 words",
			kind: workrules.TooLong,
		},
		{
			name: "a word too long", in: &nodev1.Workload{Command: []string{"a", strings.Repeat("x", workrules.MaxArgument+1)}},
			field: "command[1]", text: "more than 32768", kind: workrules.TooLong,
		},
		{
			name: "too much together", in: &nodev1.Workload{Command: append([]string{"a"},
				repeat(strings.Repeat("x", workrules.MaxArgument), 9)...)},
			field: "command, args and env", text: "more than 262144", kind: workrules.TooLong,
		},
	} {
		got := workrules.Check(tc.in)
		if tc.field == "" {
			if len(got) != 0 {
				t.Errorf("%s: %v, want nothing wrong", tc.name, got)
			}
			continue
		}
		if len(got) != 1 || !strings.HasPrefix(got[0].Field, tc.field) || !strings.Contains(got[0].Text, tc.text) ||
			got[0].Kind != tc.kind {
			t.Errorf("%s: %+v, want %s %s (kind %d)", tc.name, got, tc.field, tc.text, tc.kind)
		}
		for _, p := range got {
			if len(p.String()) > 300 {
				t.Errorf("%s: the refusal has %d bytes", tc.name, len(p.String()))
			}
		}
	}
}

func repeat(word string, n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = word
	}
	return out
}
