package drill

import (
	"context"
	"fmt"
	"path/filepath"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/cluster"
)

// held is a workspace on a machine.
type held struct {
	id, node, url string
	machine       *agents.Agent
	dir           string // of the machine
}

// onMachine makes a workspace on one of the machines and returns it with that machine.
func onMachine(ctx context.Context, m *Mesh, c *cluster.Cluster) (held, error) {
	op, err := m.create(ctx, fresh("release"),
		&lifecyclev1.WorkspaceSpec{Placement: commonv1.PlacementDriver_PLACEMENT_DRIVER_STATIC})
	if err != nil {
		return held{}, err
	}
	id := op.GetWorkspaceId()
	if err := await(ctx, "the workspace to serve", settle,
		func(ctx context.Context) error { return m.serving(ctx, id, op.GetEpoch()) }); err != nil {
		return held{}, err
	}
	ws, err := m.workspace(ctx, id)
	if err != nil {
		return held{}, err
	}
	for _, a := range c.Nodes {
		if a.Name() == ws.GetNodeName() {
			return held{
				id: id, node: ws.GetNodeId(), url: ws.GetEndpoints()[0].GetUrl(), machine: a, dir: machineDir(c, a),
			}, nil
		}
	}
	return held{}, fmt.Errorf("the workspace stands on %s, which is no machine of this mesh", ws.GetNodeName())
}

// machineDir returns the directory of a machine.
func machineDir(c *cluster.Cluster, machine *agents.Agent) string {
	return filepath.Join(c.Dir(), "agents", machine.Name())
}
