package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	"github.com/gpuaas/mesh/internal/obs"
)

// Groups of commands in the help.
const (
	groupMesh     = "mesh"
	groupServices = "services"
)

// newRoot returns the root command with all commands.
func newRoot(program *kit.Program) *cobra.Command {
	root := &cobra.Command{
		Use:   "gpuaas",
		Short: "A control plane for a fleet of GPU machines and the workspaces on them",
		Long: "gpuaas is the control plane of a GPUaaS mesh, its tools and its client in one binary.\n" +
			"Start a whole mesh on this machine with `gpuaas dev`; talk to it from another shell.",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return kit.UnknownCommand(cmd, args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.AddGroup(&cobra.Group{ID: groupMesh, Title: "A mesh on this machine"},
		&cobra.Group{ID: groupServices, Title: "Services and their database"})
	root.AddCommand(newDevCommand(), newClusterCommand(), newBenchCommand(program), newDrillCommand(program))
	root.AddCommand(newServiceCommands()...)
	root.AddCommand(newMigrateCommand(), newComposeCommand(), newIssuerCommand(program), newAuthorityCommand(),
		newConfigCommand(), newVersionCommand(program))
	client.Attach(program, root)
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	addExamples(root)
	return root
}

func newVersionCommand(program *kit.Program) *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version and the revision of this build", Args: noArgs,
		RunE: program.Local(func(_ context.Context, pr *output.Printer, _ []string) error {
			version, revision := obs.Build()
			if pr.Structured() {
				return pr.Document(output.Members(output.With("version", version), output.With("revision", revision)))
			}
			line := "gpuaas " + version
			if revision != "unknown" {
				line += " (" + revision + ")"
			}
			return pr.Line(line)
		}),
	}
}

// needs makes cmd a command that only has subcommands; what names them in the error of a line without one.
func needs(cmd *cobra.Command, what string, subs ...*cobra.Command) *cobra.Command {
	cmd.Args = func(cmd *cobra.Command, _ []string) error {
		return exit.Usage(fmt.Errorf("%s needs %s", cmd.CommandPath(), what))
	}
	cmd.RunE = func(*cobra.Command, []string) error { return nil }
	cmd.AddCommand(subs...)
	return cmd
}

func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return exit.Usage(fmt.Errorf("%s: unexpected argument %q", cmd.CommandPath(), args[0]))
	}
	return nil
}
