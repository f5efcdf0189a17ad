package fleet_test

import (
	"path/filepath"
	"testing"

	"github.com/gpuaas/mesh/bench/fleet"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/meshtest"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// TestTheFirstSweepsOfALoadedFleetFindNothing: what is loaded is what a mesh would have written, in the workload
// database too.
func TestTheFirstSweepsOfALoadedFleetFindNothing(t *testing.T) {
	testkit.IO(t)
	result, err := fleet.RunSweeps(testkit.Context(t), fleet.SweepOptions{
		Nodes: 100, Workspaces: 1000, Agent: filepath.Join(meshtest.Programs(t), agents.Program), Version: "test",
	})
	if err != nil {
		t.Fatal(err)
	}
	if !result.Passed {
		t.Errorf("the first sweeps found %v", result.Details["found"])
	}
}
