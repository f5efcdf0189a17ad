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

// TestAUsageErrorNamesTheArgumentAndWhatToGive: the error of a wrong flag, or of a wrong value, is the first thing that
// is wrong with the line, and a hint follows that has what to give instead.
func TestAUsageErrorNamesTheArgumentAndWhatToGive(t *testing.T) {
	mesh(t)
	for line, want := range map[string][]string{
		"nodes list --colour": {`unknown flag --colour of "gpuaas nodes list"`, "hint: `gpuaas nodes list --help` lists"},
		"nodes list -Zx":      {`unknown flag -Zx of "gpuaas nodes list"`, "hint: `gpuaas nodes list --help` lists"},
		"people end -5":       {`unknown flag -5 of "gpuaas people end"`, "hint: an argument that begins with a dash stands"},
		"nodes list --limit":  {"--limit needs a value", "hint: --limit: at most this many items"},
		"workspaces create d --gpus 99999999999": {
			`--gpus "99999999999" is out of range`, "hint: give a smaller number; --gpus: GPUs, exclusively, from 0 to 64",
		},
		"workspaces create d --gpus -99999999999": {`--gpus "-99999999999" is out of range`, "hint: give a larger number;"},
		"workspaces create d --tenant acme --port 99999": {
			`--port "99999": a port is from 0 to 65535`, "hint: --port: [NAME=]PORT that the workload listens on",
		},
		"workspaces create d --tenant acme --env A": {"--env needs NAME=VALUE", "hint: --env: NAME=VALUE in"},
		"workspaces create d --tenant acme --min-uptime 6m": {
			"--min-uptime 6m0s: it is from 0s to 5m0s", "hint: --min-uptime: the workload is ready",
		},
		"allocations force-release A --expected-fence -1 --fenced-proof powered_off --reason r": {
			"--expected-fence -1 is no fence: it is a whole number of 1 or more",
			"hint: give the one that `gpuaas allocations get A` shows",
		},
	} {
		got := call(t, strings.Fields(line)...).wants(t, 2)
		for _, text := range want {
			if !strings.Contains(got.err, text) {
				t.Errorf("%s: %s, want %s", line, got.err, text)
			}
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
