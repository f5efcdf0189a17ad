package client

import (
	"github.com/spf13/cobra"
)

// groupID is the heading of the client's commands in the help.
const groupID = "client"

// Attach adds the global flags and all commands to a root. If the root already has a command of that name (`config`),
// that command gets the client's subcommands.
func Attach(p *Program, root *cobra.Command) {
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
	root.SetHelpFunc(p.help)
	completeNothingElse(root)
	root.SilenceErrors, root.SilenceUsage = true, true
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return Usage(wrongValue(err)) })
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
func Commands(p *Program) []*cobra.Command {
	return []*cobra.Command{
		statusCommand(p), tenantsCommand(p), peopleCommand(p), nodesCommand(p), workspacesCommand(p),
		instancesCommand(p), claimsCommand(p), allocationsCommand(p), findingsCommand(p), tasksCommand(p),
		auditCommand(p), eventsCommand(p), policyCommand(p), explainCommand(p), incidentsCommand(p), brakeCommand(p),
		rollbackCommand(p), keysCommand(p), retentionCommand(p), projectionsCommand(p),
		configCommand(p),
	}
}
