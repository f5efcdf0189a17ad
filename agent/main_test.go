package agent_test

import (
	"os"
	"testing"

	"github.com/gpuaas/mesh/agent/runtime/process"
	"github.com/gpuaas/mesh/internal/testkit"
)

// The test binary is also the agent's binary: the shims of its workloads are its subcommand.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "shim" {
		os.Exit(process.ShimMain(os.Args[2:]))
	}
	testkit.Main(m)
}
