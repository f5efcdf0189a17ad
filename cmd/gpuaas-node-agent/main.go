// Command gpuaas-node-agent is the agent of a GPU machine or of a launched instance.
//
// Exit codes: 0 an orderly end · 1 an error · 2 usage or configuration · 4 not allowed, such as a second agent on one
// state directory · 5 this instance has been replaced by one of a later epoch: a supervisor must not start it again.
package main

import (
	"context"
	"os"

	"github.com/gpuaas/mesh/agent/runtime/process"
)

func main() {
	// The two subcommands that run beside the agent start before any part of the agent is set up, because a shim lives as
	// long as its workload.
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "shim":
			os.Exit(process.ShimMain(os.Args[2:]))
		case "demo-workload":
			os.Exit(process.DemoMain(os.Args[2:]))
		}
	}
	os.Exit(execute(context.Background(), os.Args[1:], os.Stdout, os.Stderr))
}
