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

// Scenario: a log of 20,000 audit entries. The entries of one tenant, of one workspace and of one node are found by an
// index, with the plan that serves all arguments: a tenant that has few entries does not read those of all others.
func TestTheAuditEntriesOfOneAreFoundByAnIndex(t *testing.T) {
	testkit.IO(t)
	ctx, database := testkit.Context(t), testkit.DB(t)
	for _, sql := range []string{
		`INSERT INTO readmodel.audit (number, pos, event_id, source, entry, previous_hash, hash)
			SELECT i, i, gen_random_uuid(), 'lifecycle', jsonb_build_object('action', 'some.thing',
				'tenant_id', CASE WHEN i % 4 > 0 THEN md5((i % 100)::text)::uuid::text ELSE '' END,
				'workspace_id', CASE WHEN i % 4 > 1 THEN md5((i % 1000)::text)::uuid::text ELSE '' END,
				'node_id', CASE WHEN i % 4 > 2 THEN md5((i % 1000)::text)::uuid::text ELSE '' END)::text,
				sha256('x'), sha256(i::text::bytea)
			FROM generate_series(1, 20000) i`,
		`ANALYZE readmodel.audit`,
	} {
		if _, err := database.OwnerPool().Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	db, err := database.Pool(pg.RoleReadmodel).Acquire(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Release()
	if _, err := db.Exec(ctx, `SET plan_cache_mode = force_generic_plan`); err != nil {
		t.Fatal(err)
	}
	for n, tt := range []struct {
		parts list.Parts
		index string
		args  string
	}{
		{list.Parts{Conditions: []list.Condition{auditOfTenants}, Scoped: true}, "audit_by_tenant", "'%s', 101"},
		{list.Parts{Conditions: []list.Condition{auditOfWorkspace}}, "audit_by_workspace", "NULL, '%s', 101"},
		{list.Parts{Conditions: []list.Condition{auditOfNode}}, "audit_by_node", "NULL, '%s', 101"},
	} {
		statement := listAudit.For(tt.parts)
		name := fmt.Sprintf("audit_of_one_%d", n)
		if _, err := db.Exec(ctx, "PREPARE "+name+" AS "+statement.SQL()); err != nil {
			t.Fatal(err)
		}
		rows, err := db.Query(ctx, fmt.Sprintf("EXPLAIN EXECUTE %s ("+tt.args+")", name, ids.New()))
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
			t.Errorf("%s does not use %s:\n%s", statement.SQL(), tt.index, plan.String())
		}
	}
}
