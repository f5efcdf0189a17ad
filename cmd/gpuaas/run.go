package main

import (
	"context"
	"io"
	"os"

	"charm.land/fang/v2"
	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client"
	"github.com/gpuaas/mesh/internal/obs"
)

// execute runs a command line and answers the exit code. How commands are parsed and dressed is known here alone.
func execute(ctx context.Context, args []string, in io.Reader, out, errOut io.Writer) int {
	program := client.New()
	root := newRoot(program) //nolint:contextcheck // each command takes its context from ExecuteContext below
	root.SetArgs(args)
	root.SetIn(in)
	root.SetOut(out)
	root.SetErr(errOut)
	version, revision := obs.Build()
	err := run(ctx, root, args, version, revision)
	client.Report(errOut, err, program.JSON() || asksJSON(args))
	return client.Exit(err)
}

// run dresses the help for a terminal. Everything else goes without: to choose its colours the dress asks the terminal for its background, whose answer
// would land in the input of whatever runs next.
func run(ctx context.Context, root *cobra.Command, args []string, version, revision string) error {
	file, ok := root.OutOrStdout().(*os.File)
	if !ok || !isTerminal(file) || !asksHelp(args) {
		root.SilenceErrors, root.SilenceUsage = true, true
		root.Version = version
		return root.ExecuteContext(ctx)
	}
	return fang.Execute(ctx, root, fang.WithVersion(version), fang.WithCommit(revision), fang.WithErrorHandler(func(io.Writer, fang.Styles, error) {}))
}

// asksHelp says whether a command line can only end in help.
func asksHelp(args []string) bool {
	if len(args) == 0 || args[0] == "help" || args[0] == "man" {
		return true
	}
	for _, arg := range args {
		switch arg {
		case "-h", "--help":
			return true
		case "--":
			return false
		}
	}
	return false
}

// asksJSON finds the wish for JSON in a command line that could not be parsed.
func asksJSON(args []string) bool {
	for i, arg := range args {
		switch arg {
		case "-ojson", "-o=json", "--output=json", "-ojsonl", "-o=jsonl", "--output=jsonl":
			return true
		case "-o", "--output":
			if i+1 < len(args) && (args[i+1] == "json" || args[i+1] == "jsonl") {
				return true
			}
		case "--":
			return false
		}
	}
	return false
}
