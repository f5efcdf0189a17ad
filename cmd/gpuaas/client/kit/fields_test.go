package kit_test

import (
	"testing"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
)

// TestFieldsAreNamedByTheirFlags: a message of the mesh about a field is printed with the flag or the argument that
// filled it.
func TestFieldsAreNamedByTheirFlags(t *testing.T) {
	for _, tt := range []struct {
		line []string
		path string
		want string
	}{
		{[]string{"people", "create"}, "expires_in", "--expires"},
		{[]string{"people", "create"}, "name", "NAME"},
		{[]string{"people", "end"}, "person", "PERSON"},
		{[]string{"workspaces", "create"}, "spec.storage_bytes", "--storage"},
		{[]string{"workspaces", "create"}, "spec.workloads[0].name", "--workload"},
		{[]string{"workspaces", "create"}, "spec.workloads[0].image", "--image"},
		{[]string{"workspaces", "create"}, "spec.workloads[0].args[3]", "--arg"},
		{[]string{"workspaces", "create"}, `spec.workloads[0].env["A.B"]`, "--env"},
		{[]string{"workspaces", "create"}, "spec.workloads[0].ports[1].port", "--port"},
		{[]string{"workspaces", "create"}, "spec.workloads[0].readiness.http_path", "--ready-path"},
		{[]string{"workspaces", "create"}, "spec.workloads", "--command"},
		{[]string{"workspaces", "create"}, "name", "NAME"},
		{[]string{"workspaces", "create", "--spec", "x.yaml"}, "spec.workloads[0].image", ""},
		{[]string{"workspaces", "create", "--spec", "x.yaml", "--gpus", "9"}, "spec.gpus", "--gpus"},
		{[]string{"workspaces", "timeline"}, "run_id", "--run"},
		{[]string{"nodes", "enroll"}, "valid_for", "--valid-for"},
		{[]string{"tenants", "create"}, "quota.storage_bytes", "--storage"},
		{[]string{"tasks", "list"}, "page_size", "--limit"},
		{[]string{"tasks", "list"}, "page_token", "--page-token"},
		{[]string{"policy", "set"}, "key", "KEY"},
		{[]string{"events", "show"}, "kind", "--type"},
		{[]string{"events", "parked"}, "consumer", "CONSUMER"},
		{[]string{"events", "replay"}, "consumer", "CONSUMER"},
		{[]string{"keys", "rotate"}, "kind", "KIND"},
		{[]string{"workspaces", "get"}, "workspace", "WS"},
		{[]string{"tokens", "revoke"}, "token_id", "TOKEN"},
		{[]string{"allocations", "force-release"}, "request.ack_orphans[0]", "--ack-orphan"},
		{[]string{"allocations", "force-release"}, "request.expected_fence", "--expected-fence"},
		{[]string{"policy", "set"}, "nothing.of.it", ""},
	} {
		root := &cobra.Command{Use: "gpuaas"}
		client.Attach(kit.New(), root)
		cmd, rest, err := root.Find(tt.line)
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.ParseFlags(rest); err != nil {
			t.Fatal(err)
		}
		if got := kit.FlagName(cmd, tt.path); got != tt.want {
			t.Errorf("%v: %s is %q, want %q", tt.line, tt.path, got, tt.want)
		}
	}
}

// TestEveryNamedFlagExists: the table names no flag that no command has.
func TestEveryNamedFlagExists(t *testing.T) {
	root := &cobra.Command{Use: "gpuaas"}
	client.Attach(kit.New(), root)
	known := map[string]bool{}
	var walk func(*cobra.Command)
	walk = func(cmd *cobra.Command) {
		for _, name := range kit.FlagOf {
			known[name] = known[name] || cmd.Flags().Lookup(name) != nil
		}
		for _, sub := range cmd.Commands() {
			walk(sub)
		}
	}
	walk(root)
	for field, name := range kit.FlagOf {
		if !known[name] {
			t.Errorf("%s: no command has --%s", field, name)
		}
	}
}
