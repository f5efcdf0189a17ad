package lookup

import (
	"context"
	"fmt"
	"slices"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/list"
)

// Nameless is an object that has the ids of a workspace and of a node, and pointers to where their names go. A pointer
// is nil if the object has no field for that name.
type Nameless struct {
	WorkspaceID, NodeID string
	Workspace, Node     *string
}

var (
	namesOfWorkspaces = pg.Define(pg.RoleReadmodel, "lookup.names_of_workspaces", `
	SELECT w.workspace_id::text AS id, w.tenant || '/' || w.name AS text FROM readmodel.workspace w
	WHERE w.workspace_id = ANY($1::uuid[]) AND ($2::uuid IS NULL OR w.tenant_id = $2)`)
	namesOfNodes = pg.Define(pg.RoleReadmodel, "lookup.names_of_nodes", `
	SELECT n.node_id::text AS id, n.name AS text FROM readmodel.node n
		WHERE n.node_id = ANY($1::uuid[]) AND ($2::uuid IS NULL OR n.tenant_id = $2)`)
	ownersOfNames = pg.Define(pg.RoleReadmodel, "lookup.owners_of_names", `
	SELECT w.workspace_id::text AS id, w.tenant_id::text AS text FROM readmodel.workspace w
		WHERE w.workspace_id = ANY($1::uuid[])
	UNION ALL SELECT n.node_id::text, COALESCE(n.tenant_id::text, '') FROM readmodel.node n
		WHERE n.node_id = ANY($2::uuid[])`)
)

// Name fills in the names of a page's workspaces (tenant/name) and nodes, if the scope includes them, with one query
// for each of the two, whatever the number of objects.
func (f Finder) Name(ctx context.Context, objects []Nameless) error {
	workspaces, err := f.namesOf(ctx, objects, func(o Nameless) (string, *string) { return o.WorkspaceID, o.Workspace },
		namesOfWorkspaces)
	if err != nil {
		return fmt.Errorf("name workspaces: %w", err)
	}
	nodes, err := f.namesOf(ctx, objects, func(o Nameless) (string, *string) { return o.NodeID, o.Node }, namesOfNodes)
	if err != nil {
		return fmt.Errorf("name nodes: %w", err)
	}
	for _, o := range objects {
		if o.Workspace != nil {
			*o.Workspace = workspaces[o.WorkspaceID]
		}
		if o.Node != nil {
			*o.Node = nodes[o.NodeID]
		}
	}
	return nil
}

func (f Finder) namesOf(ctx context.Context, objects []Nameless, of func(Nameless) (string, *string),
	names *pg.Statement,
) (map[string]string, error) {
	var wanted []string
	for _, o := range objects {
		if id, place := of(o); place != nil && list.IsID(id) {
			wanted = append(wanted, id)
		}
	}
	if len(wanted) == 0 {
		return nil, nil
	}
	slices.Sort(wanted)
	return list.Pairs(ctx, f.db, names, slices.Compact(wanted), f.scope.Arg())
}

// NamePage fills in the names of one page of a list.
func NamePage[T any](
	ctx context.Context, f Finder, of func(T) Nameless, items []T, next string, err error,
) ([]T, string, error) {
	if err != nil {
		return nil, "", err
	}
	objects := make([]Nameless, len(items))
	for i, item := range items {
		objects[i] = of(item)
	}
	return items, next, f.Name(ctx, objects)
}

// NameOwners returns the tenants of workspaces and nodes, by their ids: empty for a node without a tenant. A caller
// that reads objects for several scopes at once uses it to remove the names that a scope does not include.
func (f Finder) NameOwners(ctx context.Context, workspaceIDs, nodeIDs []string) (map[string]string, error) {
	if len(workspaceIDs)+len(nodeIDs) == 0 {
		return map[string]string{}, nil
	}
	owners, err := list.Pairs(ctx, f.db, ownersOfNames, workspaceIDs, nodeIDs)
	if err != nil {
		return nil, fmt.Errorf("read whose names are: %w", err)
	}
	return owners, nil
}
