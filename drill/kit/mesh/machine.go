package mesh

import (
	"context"
	"fmt"
	"path/filepath"

	"github.com/gpuaas/mesh/drill/kit/await"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/cluster"
)

// Held is a workspace on a machine.
type Held struct {
	ID, Node, URL string
	Machine       *agents.Agent
	Dir           string // of the machine
}

// PlaceOnMachine makes a workspace on one of the machines and returns it with that machine.
func PlaceOnMachine(ctx context.Context, m *Mesh, c *cluster.Cluster) (Held, error) {
	op, err := m.Create(ctx, FreshName("release"),
		&lifecyclev1.WorkspaceSpec{Placement: commonv1.PlacementDriver_PLACEMENT_DRIVER_STATIC})
	if err != nil {
		return Held{}, err
	}
	id := op.GetWorkspaceId()
	if err := await.Until(ctx, "the workspace to serve", await.Settle,
		func(ctx context.Context) error { return m.Serving(ctx, id, op.GetEpoch()) }); err != nil {
		return Held{}, err
	}
	ws, err := m.Workspace(ctx, id)
	if err != nil {
		return Held{}, err
	}
	for _, a := range c.Nodes {
		if a.Name() == ws.GetNodeName() {
			return Held{
				ID: id, Node: ws.GetNodeId(), URL: ws.GetEndpoints()[0].GetUrl(), Machine: a, Dir: MachineDir(c, a),
			}, nil
		}
	}
	return Held{}, fmt.Errorf("the workspace stands on %s, which is no machine of this mesh", ws.GetNodeName())
}

// MachineDir returns the directory of a machine.
func MachineDir(c *cluster.Cluster, machine *agents.Agent) string {
	return filepath.Join(c.Dir(), "agents", machine.Name())
}
