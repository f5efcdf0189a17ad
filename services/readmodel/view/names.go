package view

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
)

// nameless is an object that holds ids of a workspace and of a node, and where their names go. What has no place for a name leaves it nil.
type nameless struct {
	workspaceID, nodeID string
	workspace, node     *string
}

// withNames fills in the names of a page's workspaces (tenant/name) and nodes, as far as the scope meets them: one query for each, however many objects.
func (s *Snapshot) withNames(ctx context.Context, objects []nameless) error {
	workspaces, err := s.namesOf(ctx, objects, func(o nameless) (string, *string) { return o.workspaceID, o.workspace },
		`SELECT w.workspace_id::text, w.tenant || '/' || w.name FROM readmodel.workspace w
			WHERE w.workspace_id = ANY($1::uuid[]) AND ($2::uuid IS NULL OR w.tenant_id = $2)`)
	if err != nil {
		return fmt.Errorf("name workspaces: %w", err)
	}
	nodes, err := s.namesOf(ctx, objects, func(o nameless) (string, *string) { return o.nodeID, o.node },
		`SELECT n.node_id::text, n.name FROM readmodel.node n WHERE n.node_id = ANY($1::uuid[]) AND ($2::uuid IS NULL OR n.tenant_id = $2)`)
	if err != nil {
		return fmt.Errorf("name nodes: %w", err)
	}
	for _, o := range objects {
		if o.workspace != nil {
			*o.workspace = workspaces[o.workspaceID]
		}
		if o.node != nil {
			*o.node = nodes[o.nodeID]
		}
	}
	return nil
}

func (s *Snapshot) namesOf(ctx context.Context, objects []nameless, of func(nameless) (string, *string), sql string) (map[string]string, error) {
	var wanted []string
	for _, o := range objects {
		if id, place := of(o); place != nil && isUUID(id) {
			wanted = append(wanted, id)
		}
	}
	if len(wanted) == 0 {
		return nil, nil
	}
	slices.Sort(wanted)
	rows, err := s.tx.Query(ctx, sql, slices.Compact(wanted), s.scope.arg())
	if err != nil {
		return nil, err //nolint:wrapcheck // wrapped by withNames
	}
	found := map[string]string{}
	var id, name string
	_, err = pgx.ForEachRow(rows, []any{&id, &name}, func() error { found[id] = name; return nil })
	return found, err //nolint:wrapcheck // wrapped by withNames
}

// namedPage fills in the names of one page of a list.
func namedPage[T any](ctx context.Context, s *Snapshot, of func(T) nameless, items []T, next string, err error) ([]T, string, error) {
	if err != nil {
		return nil, "", err
	}
	objects := make([]nameless, len(items))
	for i, item := range items {
		objects[i] = of(item)
	}
	return items, next, s.withNames(ctx, objects)
}

// NameOwners returns whose workspaces and nodes are, by their ids: empty for a node of no tenant. What is read for several scopes at once is shown to each
// without the names that it does not meet.
func (s *Snapshot) NameOwners(ctx context.Context, workspaceIDs, nodeIDs []string) (map[string]string, error) {
	owners := map[string]string{}
	if len(workspaceIDs)+len(nodeIDs) == 0 {
		return owners, nil
	}
	rows, err := s.tx.Query(ctx, `SELECT w.workspace_id::text, w.tenant_id::text FROM readmodel.workspace w WHERE w.workspace_id = ANY($1::uuid[])
		UNION ALL SELECT n.node_id::text, COALESCE(n.tenant_id::text, '') FROM readmodel.node n WHERE n.node_id = ANY($2::uuid[])`, workspaceIDs, nodeIDs)
	if err != nil {
		return nil, fmt.Errorf("read whose names are: %w", err)
	}
	var id, tenant string
	if _, err := pgx.ForEachRow(rows, []any{&id, &tenant}, func() error { owners[id] = tenant; return nil }); err != nil {
		return nil, fmt.Errorf("read whose names are: %w", err)
	}
	return owners, nil
}
