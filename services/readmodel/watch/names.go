package watch

import (
	"context"
	"slices"

	"google.golang.org/protobuf/proto"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// named is a name that an item shows beside the id of what it names.
type named struct {
	id   string
	text *string
}

// namesOf returns the names of an item's workspace and of its node. A name is empty if the item has none, or has it in
// its own row.
func namesOf(m *readmodelv1.WatchItem) (named, named) {
	switch o := m.GetObject().(type) {
	case *readmodelv1.WatchItem_Node:
		return named{o.Node.GetWorkspaceId(), &o.Node.Workspace}, named{}
	case *readmodelv1.WatchItem_Task:
		return named{o.Task.GetWorkspaceId(), &o.Task.Workspace}, named{o.Task.GetNodeId(), &o.Task.NodeName}
	case *readmodelv1.WatchItem_Instance:
		return named{o.Instance.GetWorkspaceId(), &o.Instance.Workspace}, named{o.Instance.GetNodeId(), &o.Instance.NodeName}
	}
	return named{}, named{}
}

func (n named) shows() bool { return n.text != nil && *n.text != "" }

// withOwners records the tenants of the workspaces and nodes whose names the items show, with one query for all of
// them. Watchers of every scope share the items.
func withOwners(ctx context.Context, s *view.Snapshot, items []item) error {
	workspaces, nodes := []string{}, []string{}
	for _, i := range items {
		workspace, node := namesOf(i.message)
		if workspace.shows() {
			workspaces = append(workspaces, workspace.id)
		}
		if node.shows() {
			nodes = append(nodes, node.id)
		}
	}
	slices.Sort(workspaces)
	slices.Sort(nodes)
	owners, err := s.NameOwners(ctx, slices.Compact(workspaces), slices.Compact(nodes))
	if err != nil {
		return err
	}
	for n := range items {
		items[n].owners = owners
	}
	return nil
}

// named returns an item without the names that the scope does not include: itself, or a copy.
func (f Filter) named(i item) item {
	hidden := func(m *readmodelv1.WatchItem) []*string {
		var out []*string
		workspace, node := namesOf(m)
		for _, n := range []named{workspace, node} {
			if n.shows() && !f.Scope.Meets(i.owners[n.id]) {
				out = append(out, n.text)
			}
		}
		return out
	}
	if len(hidden(i.message)) == 0 {
		return i
	}
	i.message = proto.CloneOf(i.message)
	for _, name := range hidden(i.message) {
		*name = ""
	}
	return i
}
