package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/mesh/topology"
)

// newConfigCommand returns the commands for configuration files; the client adds those for its contexts.
func newConfigCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "config", Short: "Configuration files of services, and the contexts of this client",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return kit.UnknownCommand(cmd, args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newConfigCheckCommand())
	return cmd
}

func newConfigCheckCommand() *cobra.Command {
	var service string
	names := kit.TextsOf(topology.Kinds(), func(k topology.Kind) string { return k.Name })
	cmd := &cobra.Command{
		Use: "check FILE", Short: "Show all problems of a service's configuration file",
		Long: "check reads a configuration file as the service would and reports all problems at once, each with its " +
			"line.\n" +
			"The key `service` or --service names the service that the file is for. Nothing is contacted.",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return exit.Usage(fmt.Errorf("%s needs one FILE", cmd.CommandPath()))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			kind, err := kindOf(service, args[0], names)
			if err != nil {
				return exit.Usage(err)
			}
			found := kind.Check(args[0])
			if len(found) == 0 {
				_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s: a good configuration of %s\n", args[0], kind.Name)
				return err
			}
			for _, p := range found {
				if _, err := fmt.Fprintln(cmd.OutOrStdout(), p.Error()); err != nil {
					return err
				}
			}
			return exit.Usage(fmt.Errorf("%s: %s as a configuration of %s", args[0], human.Counted(len(found), "problem"),
				kind.Name))
		},
	}
	cmd.Flags().StringVar(&service, "service", "", "whose configuration it is: "+strings.Join(names, ", "))
	_ = cmd.RegisterFlagCompletionFunc("service", cobra.FixedCompletions(names, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func kindOf(service, file string, names []string) (topology.Kind, error) {
	if service == "" {
		return topology.Detect(file)
	}
	kind, ok := topology.Lookup(service)
	if !ok {
		return topology.Kind{}, errors.New("--service is one of " + strings.Join(names, ", "))
	}
	return kind, nil
}
