package client_test

import (
	"strings"
	"testing"
)

// TestAWrongFlagValueIsExplained: the error describes the values of a flag, without the names of the functions that
// parse it.
func TestAWrongFlagValueIsExplained(t *testing.T) {
	mesh(t)
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"nodes", "list", "--limit", "abc"}, `--limit "abc" is not a whole number`},
		{[]string{"nodes", "list", "--limit", "99999999999999999999"}, `--limit "99999999999999999999" is out of range`},
		{[]string{"workspaces", "create", "d", "--gpus", "2.5"}, `--gpus "2.5" is not a whole number`},
		{
			[]string{"workspaces", "wait", "d", "--timeout", "soon"},
			`--timeout "soon" is not a duration such as 500ms, 30s or 5m`,
		},
		{[]string{"nodes", "list", "--watch=perhaps"}, `--watch "perhaps" is neither true nor false`},
	} {
		got := call(t, c.args...).wants(t, 2)
		if !strings.Contains(got.err, c.want) || strings.Contains(got.err, "strconv") || strings.Contains(got.err, "time:") {
			t.Errorf("%v: %s, want %s", c.args, got.err, c.want)
		}
	}
}

// TestAReadThatTakesTooLongChangedNothing: only for a request that changes something does the error of a timeout warn
// that the change may have happened.
func TestAReadThatTakesTooLongChangedNothing(t *testing.T) {
	f := mesh(t)
	stock(f)
	got := call(t, "nodes", "list", "--request-timeout", "1ns").wants(t, 1)
	if !strings.Contains(got.err, "nothing was changed") || strings.Contains(got.err, "may or may not") ||
		!strings.Contains(got.err, "--request-timeout") {
		t.Errorf("a read: %s", got.err)
	}
	got = call(t, "tenants", "create", "acme", "--request-timeout", "1ns").wants(t, 1)
	if strings.Contains(got.err, "nothing was changed") || !strings.Contains(got.err, "may or may not have taken effect") {
		t.Errorf("a command: %s", got.err)
	}
}
