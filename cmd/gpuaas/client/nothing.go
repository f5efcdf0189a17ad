package client

import (
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// files are the flags whose values are files or directories: the shell completes those by itself.
var files = map[string]bool{"spec": true, "out": true, "ca-file": true, "token-file": true, "file": true}

// completeNothingElse keeps the shell from offering file names where none belongs: at the arguments of the client's
// commands, and at the values of their flags.
func completeNothingElse(root *cobra.Command) {
	for _, cmd := range root.Commands() {
		if cmd.GroupID == groupID {
			completeNothing(cmd)
		}
	}
}

func completeNothing(cmd *cobra.Command) {
	if cmd.ValidArgsFunction == nil && len(cmd.ValidArgs) == 0 && !cmd.HasSubCommands() {
		cmd.ValidArgsFunction = cobra.NoFileCompletions
	}
	cmd.LocalNonPersistentFlags().VisitAll(func(flag *pflag.Flag) {
		if !files[flag.Name] {
			// an error means that the flag has a completion already
			_ = cmd.RegisterFlagCompletionFunc(flag.Name, cobra.NoFileCompletions)
		}
	})
	for _, sub := range cmd.Commands() {
		completeNothing(sub)
	}
}
