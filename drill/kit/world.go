package kit

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// world is the API's view, at one moment, of everything that a fault is not about.
type world struct {
	workspaces, nodes map[string]string
	restless          map[string]bool   // nodes with a reason: what an earlier fault has left may end meanwhile
	lasting           map[string]string // of nodes, what stays as it is when their reason ends
	parked            int32
}

// readWorld reads the world without the objects of the fault: workspaces by id, nodes by id, and the instances of those
// workspaces.
func readWorld(ctx context.Context, m *mesh.Mesh, subject []string) (world, error) {
	var w world
	err := await.Until(ctx, "a look at what is to stay as it is", await.Patience, func(ctx context.Context) error {
		w = world{
			workspaces: map[string]string{}, nodes: map[string]string{}, restless: map[string]bool{},
			lasting: map[string]string{},
		}
		if err := w.readWorkspaces(ctx, m, subject); err != nil {
			return err
		}
		if err := w.readNodes(ctx, m, subject); err != nil {
			return err
		}
		status, err := m.Client.Query.GetStatus(ctx, &readmodelv1.GetStatusRequest{})
		w.parked = status.GetParkedEvents()
		return err
	})
	return w, err
}

// comeToRest waits until active nodes have no reason and active workspaces are not on their way back, as after an
// earlier drill: they would be taken for changes by the next fault. The error names what did not come to rest.
func comeToRest(ctx context.Context, m *mesh.Mesh) error {
	return await.Until(ctx, "nodes and workspaces to come to rest", time.Minute, func(ctx context.Context) error {
		if err := nodesRest(ctx, m); err != nil {
			return err
		}
		for token := ""; ; {
			resp, err := m.Client.Query.ListWorkspaces(ctx, &readmodelv1.ListWorkspacesRequest{PageSize: 500, PageToken: token})
			if err != nil {
				return err
			}
			for _, ws := range resp.GetItems() {
				moving := ws.GetState() == commonv1.WorkspaceState_WORKSPACE_STATE_RECREATING ||
					ws.GetState() == commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE &&
						(ws.GetUserState() == commonv1.UserState_USER_STATE_TEMPORARY ||
							ws.GetManagement().GetState() == readmodelv1.LayerState_LAYER_STATE_AWAY)
				if moving {
					return fmt.Errorf("%s/%s is %s, %s, its management %s", ws.GetTenant(), ws.GetName(), names.Of(ws.GetState()),
						names.Of(ws.GetUserState()), names.Of(ws.GetManagement().GetState()))
				}
			}
			if token = resp.GetNextPageToken(); token == "" {
				return nil
			}
		}
	})
}

// nodesRest returns nil if no active node has a reason: one that has is still what an earlier fault made of it.
func nodesRest(ctx context.Context, m *mesh.Mesh) error {
	for token := ""; ; {
		resp, err := m.Client.Query.ListNodes(ctx, &readmodelv1.ListNodesRequest{PageSize: 500, PageToken: token})
		if err != nil {
			return err
		}
		for _, n := range resp.GetItems() {
			active := n.GetIdentity().GetState() == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE
			if active && n.GetReason() != "" {
				return fmt.Errorf("node %s did not come to rest: it is %s to its user, %s", n.GetName(),
					names.Of(n.GetUserState()), n.GetReason())
			}
		}
		if token = resp.GetNextPageToken(); token == "" {
			return nil
		}
	}
}

func (w world) readWorkspaces(ctx context.Context, m *mesh.Mesh, subject []string) error {
	for token := ""; ; {
		resp, err := m.Client.Query.ListWorkspaces(ctx, &readmodelv1.ListWorkspacesRequest{PageSize: 500, PageToken: token})
		if err != nil {
			return err
		}
		for _, ws := range resp.GetItems() {
			over := ws.GetState() == commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED
			if !over && !slices.Contains(subject, ws.GetWorkspaceId()) {
				w.workspaces[ws.GetTenant()+"/"+
					ws.GetName()] = fmt.Sprintf("%s, %s to its user, epoch %d, on %s, stalled %t, %d refused registers",
					names.Of(ws.GetState()), names.Of(ws.GetUserState()), ws.GetEpoch(), ws.GetNodeName(), ws.GetStalled(),
					ws.GetRegisterFailures())
			}
		}
		if token = resp.GetNextPageToken(); token == "" {
			return nil
		}
	}
}

func (w world) readNodes(ctx context.Context, m *mesh.Mesh, subject []string) error {
	for token := ""; ; {
		resp, err := m.Client.Query.ListNodes(ctx, &readmodelv1.ListNodesRequest{PageSize: 500, PageToken: token})
		if err != nil {
			return err
		}
		for _, n := range resp.GetItems() {
			if slices.Contains(subject, n.GetNodeId()) || slices.Contains(subject, n.GetIdentity().GetWorkspaceId()) {
				continue
			}
			w.lasting[n.GetName()] = fmt.Sprintf("identity %s %s, cordoned %t", names.Of(n.GetIdentity().GetState()),
				n.GetIdentity().GetNodeInstanceId(), n.GetGate().GetCordoned())
			w.nodes[n.GetName()] = fmt.Sprintf("connected %t, %s to its user %s, %s", n.GetConnected(),
				names.Of(n.GetUserState()), n.GetReason(), w.lasting[n.GetName()])
			w.restless[n.GetName()] = n.GetReason() != ""
		}
		if token = resp.GetNextPageToken(); token == "" {
			return nil
		}
	}
}

// changed returns what differs from an earlier world. That a node has no reason any more is no difference.
func (w world) changed(now world) []string {
	var out []string
	for _, c := range []struct {
		kind        string
		before, now map[string]string
	}{{"workspace", w.workspaces, now.workspaces}, {"node", w.nodes, now.nodes}} {
		for _, name := range slices.Sorted(maps.Keys(c.before)) {
			if c.kind == "node" && w.restless[name] && !now.restless[name] && now.lasting[name] == w.lasting[name] {
				continue
			}
			if now, ok := c.now[name]; !ok || now != c.before[name] {
				out = append(out, fmt.Sprintf("%s %s, which the fault is not about, was (%s) and is (%s)", c.kind, name,
					c.before[name], now))
			}
		}
	}
	if now.parked != w.parked {
		out = append(out, fmt.Sprintf("%d events are parked, %d were", now.parked, w.parked))
	}
	return out
}
