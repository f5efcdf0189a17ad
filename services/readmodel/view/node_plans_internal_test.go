package view

import (
	"fmt"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/list"
)

// Scenario: a fleet of 5,000 machines, each with an instance. The instances of one node, the workspaces on it and the
// machines of one workspace are found by an index, with the plan that serves all arguments, for all tenants and for
// one.
func TestWhatIsOnOneNodeIsFoundByAnIndex(t *testing.T) {
	testkit.IO(t)
	ctx, database := testkit.Context(t), testkit.DB(t)
	db, err := database.Pool(pg.RoleReadmodel).Acquire(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Release()
	for _, sql := range []string{
		`INSERT INTO readmodel.instance (instance_id, version, workspace_id, tenant_id, live, body)
			SELECT gen_random_uuid(), 1, gen_random_uuid(), md5((i % 50)::text)::uuid, true,
				jsonb_build_object('node_id', md5(i::text)::uuid)
			FROM generate_series(1, 5000) i`,
		`INSERT INTO readmodel.workspace (workspace_id, version, tenant_id, tenant, name, state, node_id, body)
			SELECT gen_random_uuid(), 1, md5((i % 50)::text)::uuid, 't' || i % 50, 'w' || i, 'active', md5(i::text)::uuid, '{}'
			FROM generate_series(1, 5000) i`,
		`INSERT INTO readmodel.node (node_id, version, name, state, tenant_id, body)
			SELECT md5(i::text)::uuid, 1, 'n' || i, 'active', md5((i % 50)::text)::uuid,
				jsonb_build_object('workspace_id', md5(i::text)::uuid)
			FROM generate_series(1, 5000) i`,
		`SET plan_cache_mode = force_generic_plan`,
	} {
		if _, err := db.Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := database.OwnerPool().Exec(ctx,
		"ANALYZE readmodel.instance, readmodel.workspace, readmodel.node"); err != nil {
		t.Fatal(err)
	}
	for n, tt := range []struct {
		list  *pg.Dynamic[list.Parts]
		where []list.Condition
		index string
		args  string // without the tenant, which is the last before the node
	}{
		{listInstances, []list.Condition{onNode}, "instance_by_node", ""},
		{listWorkspaces, []list.Condition{workspacesNotOver, workspacesOnNode}, "workspace_by_node", "now(), '15 s', "},
		{listNodes, []list.Condition{nodesNotRetired, nodesOfWorkspace}, "node_by_workspace", "now(), '15 s', "},
	} {
		for _, scoped := range []bool{false, true} {
			statement := tt.list.For(list.Parts{Conditions: tt.where, Scoped: scoped})
			name, tenant := fmt.Sprintf("of_node_%d_%t", n, scoped), "NULL"
			if scoped {
				tenant = "'" + ids.New() + "'"
			}
			if _, err := db.Exec(ctx, "PREPARE "+name+" AS "+statement.SQL()); err != nil {
				t.Fatal(err)
			}
			rows, err := db.Query(ctx, fmt.Sprintf("EXPLAIN EXECUTE %s (%s%s, '%s', 501)", name, tt.args, tenant, ids.New()))
			if err != nil {
				t.Fatal(err)
			}
			var plan strings.Builder
			for rows.Next() {
				var line string
				if err := rows.Scan(&line); err != nil {
					t.Fatal(err)
				}
				plan.WriteString(line + "\n")
			}
			if err := rows.Err(); err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(plan.String(), tt.index) {
				t.Errorf("%s scoped %t does not use %s:\n%s", statement.Name(), scoped, tt.index, plan.String())
			}
		}
	}
}
