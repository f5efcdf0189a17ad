package client

import (
	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/controlplane"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/inventory"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/nodes"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/people"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/profiles"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/records"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/tokens"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/workspaces"
)

// groupID is the heading of the client's commands in the help.
const groupID = "client"

// Attach adds the global flags and all commands to a root. If the root already has a command of that name (`config`),
// that command gets the client's subcommands.
func Attach(p *kit.Program, root *cobra.Command) {
	p.Flags(root)
	root.AddGroup(&cobra.Group{ID: groupID, Title: "Ask a running mesh"})
	for _, cmd := range Commands(p) {
		if have := child(root, cmd.Name()); have != nil {
			have.AddCommand(cmd.Commands()...)
			continue
		}
		cmd.GroupID = groupID
		root.AddCommand(cmd)
	}
	root.AddCommand(manCommand(), exitCodesTopic())
	root.SetHelpFunc(p.Help)
	completeNothingElse(root)
	root.SilenceErrors, root.SilenceUsage = true, true
	root.SetFlagErrorFunc(kit.FlagError)
}

func child(parent *cobra.Command, name string) *cobra.Command {
	for _, cmd := range parent.Commands() {
		if cmd.Name() == name {
			return cmd
		}
	}
	return nil
}

// Commands returns all commands of the client.
func Commands(p *kit.Program) []*cobra.Command {
	return []*cobra.Command{
		controlplane.StatusCommand(p), inventory.TenantsCommand(p), people.Command(p), nodes.Command(p),
		workspaces.Command(p), inventory.InstancesCommand(p), inventory.ClaimsCommand(p), inventory.AllocationsCommand(p),
		records.FindingsCommand(p), nodes.TasksCommand(p), records.AuditCommand(p), records.EventsCommand(p),
		controlplane.PolicyCommand(p), controlplane.ExplainCommand(p), records.IncidentsCommand(p), records.BrakeCommand(p),
		records.NotificationsCommand(p),
		controlplane.RollbackCommand(p), controlplane.KeysCommand(p), controlplane.CACommand(p), tokens.Command(p),
		profiles.Command(p),
		controlplane.RetentionCommand(p),
		controlplane.ProjectionsCommand(p), controlplane.ConfigCommand(p),
	}
}
