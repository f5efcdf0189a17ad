package mesh

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/gpuaas/mesh/drill/kit/await"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
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
	if err := m.AwaitServing(ctx, id, op.GetEpoch()); err != nil {
		return Held{}, err
	}
	ws, err := m.Workspace(ctx, id)
	if err != nil {
		return Held{}, err
	}
	i := slices.IndexFunc(c.Nodes, func(a *agents.Agent) bool { return a.Name() == ws.GetNodeName() })
	if i < 0 {
		return Held{}, fmt.Errorf("the workspace stands on %s, which is no machine of this mesh", ws.GetNodeName())
	}
	return Held{
		ID: id, Node: ws.GetNodeId(), URL: ws.GetEndpoints()[0].GetUrl(), Machine: c.Nodes[i],
		Dir: MachineDir(c, c.Nodes[i]),
	}, nil
}

// Node returns a node by its id or its name.
func (m *Mesh) Node(ctx context.Context, ref string) (*readmodelv1.Node, error) {
	resp, err := m.Client.Query.GetNode(ctx, &readmodelv1.GetNodeRequest{Node: ref})
	return resp.GetNode(), err
}

// StartMachine starts a machine's agent again, and waits until the node is connected and admitted. If the agent does
// not run, that must be in a session which it has opened since: the API shows the last one as connected for a moment
// after its agent has ended.
func (m *Mesh) StartMachine(ctx context.Context, machine *agents.Agent) error {
	ended := ""
	if !machine.Running() {
		node, err := await.Answer(ctx, "the last session of "+machine.Name(),
			func(ctx context.Context) (*readmodelv1.Node, error) { return m.Node(ctx, machine.Name()) })
		if err != nil {
			return err
		}
		ended = node.GetSession().GetSessionId()
	}
	if err := machine.Start(); err != nil {
		return err
	}
	return await.Until(ctx, machine.Name()+" to be connected again", await.Limit, func(ctx context.Context) error {
		node, err := m.Node(ctx, machine.Name())
		if err == nil && (!node.GetConnected() || !node.GetGate().GetAdmitted()) {
			err = errors.New("it is not")
		}
		if err == nil && ended != "" && node.GetSession().GetSessionId() == ended {
			err = fmt.Errorf("its session is %s, which its agent had before it ended", ended)
		}
		return err
	})
}

// MachineDir returns the directory of a machine.
func MachineDir(c *cluster.Cluster, machine *agents.Agent) string {
	return filepath.Join(c.Dir(), "agents", machine.Name())
}
