package client

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
)

// exitCodesTopic returns a topic of the help, which is a command that only has a help text.
func exitCodesTopic() *cobra.Command {
	var text strings.Builder
	text.WriteString("Exit codes of every command:\n\n")
	for _, e := range exit.Codes() {
		fmt.Fprintf(&text, "  %3d  %s\n", e.Code, e.Meaning)
	}
	text.WriteString("\nWith -o json an error is one object on standard error:\n" +
		`  {"error": {"code", "reason", "action", "message", "retry_after_seconds", "correlation_id", "unmet": [...]}}` +
		"\n" +
		"`gpuaas explain reason CODE` explains a reason.")
	return &cobra.Command{Use: "exit-codes", Short: "What the exit codes mean", Long: text.String()}
}
