package client

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
)

// TestHelp: every command has a description and an example, and the example is one of that command.
func TestHelp(t *testing.T) {
	root := &cobra.Command{Use: "gpuaas"}
	root.AddCommand(&cobra.Command{Use: "config", Run: func(*cobra.Command, []string) {}})
	Attach(kit.New(), root)
	var paths []string
	var walk func(*cobra.Command)
	walk = func(cmd *cobra.Command) {
		for _, sub := range cmd.Commands() {
			walk(sub)
			paths = append(paths, sub.CommandPath())
			if sub.HasSubCommands() || !sub.Runnable() {
				continue
			}
			if sub.Short == "" || strings.HasSuffix(sub.Short, ".") || !strings.Contains(sub.Example, sub.CommandPath()) {
				t.Errorf("%s: short %q, example %q", sub.CommandPath(), sub.Short, sub.Example)
			}
			if strings.Contains(sub.UsageString(), "``") {
				t.Errorf("%s: %s", sub.CommandPath(), sub.UsageString())
			}
		}
	}
	walk(root)
	for _, want := range []string{
		"policy get", "policy set", "status", "tenants create", "tenants list", "tenants get", "nodes list", "nodes get",
		"nodes watch", "nodes enroll", "nodes hold", "nodes quarantine", "nodes fence", "nodes reactivate", "nodes retire",
		"nodes cordon", "nodes uncordon", "nodes probe", "workspaces create", "workspaces list", "workspaces get",
		"workspaces watch", "workspaces wait", "workspaces timeline", "workspaces logs", "workspaces actions",
		"workspaces cancel", "workspaces reset", "workspaces retry", "workspaces retry-undo", "workspaces skip-undo",
		"workspaces recreate", "workspaces decommission", "instances list", "claims list", "allocations list",
		"allocations get", "tasks list", "tasks get", "tasks cancel", "tasks requeue", "tasks close", "explain reason",
		"config view", "config use-context",
		"man",
	} {
		if !slices.Contains(paths, "gpuaas "+want) {
			t.Errorf("there is no command %q", want)
		}
	}
	var out bytes.Buffer
	root.SetOut(&out)
	root.SetArgs([]string{"man"})
	if err := root.ExecuteContext(t.Context()); err != nil || !strings.Contains(out.String(), "workspaces") {
		t.Errorf("manual: %v, %q", err, out.String())
	}
}
