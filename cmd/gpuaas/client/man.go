package client

import (
	"fmt"

	mango "github.com/muesli/mango-cobra"
	"github.com/muesli/roff"
	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
)

// manCommand returns the command that prints the manual of all commands, including those of other packages.
func manCommand() *cobra.Command {
	return &cobra.Command{
		Use: "man", Short: "Print the manual page", Hidden: true, Example: "  gpuaas man >gpuaas.1", Args: kit.Args(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			page, err := mango.NewManPage(1, cmd.Root())
			if err != nil {
				return fmt.Errorf("make manual page: %w", err)
			}
			if _, err := fmt.Fprint(cmd.OutOrStdout(), page.Build(roff.NewDocument())); err != nil {
				return fmt.Errorf("print manual page: %w", err)
			}
			return nil
		},
	}
}
