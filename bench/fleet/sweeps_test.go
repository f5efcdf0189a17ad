package fleet_test

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/gpuaas/mesh/bench/fleet"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/meshtest"
)

func TestMain(m *testing.M) { testkit.Main(m, testkit.AtOnce(2)) }

// TestTheSweepsOfALoadedFleetFindNothing: the loaded rows are as a mesh would have written them, in the workload
// database and in the launch log too. The bench waits until silent nodes would be found as well; here two rounds have
// to do.
func TestTheSweepsOfALoadedFleetFindNothing(t *testing.T) {
	testkit.IO(t)
	for _, tt := range []struct {
		name              string
		nodes, workspaces int
		instances         bool
	}{
		{name: "slots", nodes: 50, workspaces: 500},
		{name: "instances", nodes: 200, workspaces: 200, instances: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel() // most of it is waiting for the second round
			result, err := fleet.RunSweeps(testkit.Context(t), fleet.SweepOptions{
				Nodes: tt.nodes, Workspaces: tt.workspaces, Instances: tt.instances,
				Standing: time.Nanosecond, Agent: filepath.Join(meshtest.Programs(t), agents.Program), Version: "test",
			})
			if err != nil {
				t.Fatal(err)
			}
			if !result.Passed {
				t.Errorf("the sweeps found %v", result.Details["found"])
			}
		})
	}
}
