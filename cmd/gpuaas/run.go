package main

import (
	"context"
	"io"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/internal/obs"
)

// execute runs a command line and returns the exit code.
func execute(ctx context.Context, args []string, in io.Reader, out, errOut io.Writer) int {
	program := kit.New()
	root := newRoot(program) //nolint:contextcheck // each command takes its context from ExecuteContext below
	root.SetArgs(args)
	root.SetIn(in)
	root.SetOut(out)
	root.SetErr(errOut)
	root.SilenceErrors, root.SilenceUsage = true, true
	root.Version, _ = obs.Build()
	err := root.ExecuteContext(ctx)
	if err == nil {
		err = program.HelpError()
	}
	exit.Report(errOut, err, program.JSON() || asksJSON(args))
	return exit.CodeOf(err)
}

// asksJSON reports whether a command line that could not be parsed requests JSON.
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
