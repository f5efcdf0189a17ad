package lookup

import (
	"strings"
	"testing"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/project/projecttest"
)

// TestPartsUseIndexes: whatever part of an id is given, no table is read whole, and a lookup of one tenant does not
// read past other tenants' rows.
func TestPartsUseIndexes(t *testing.T) {
	testkit.IO(t)
	w := projecttest.NewWorld(t)
	ctx, db := testkit.Context(t), w.DB.Pool(pg.RoleReadmodel)
	for _, sql := range []string{
		`INSERT INTO readmodel.workspace (workspace_id, version, tenant_id, tenant, name, state, body)
			SELECT gen_random_uuid(), 1, md5((i % 50)::text)::uuid, 't' || i % 50, 'w' || i, 'active', '{}'
				FROM generate_series(1, 5000) i`,
		`INSERT INTO readmodel.task (task_id, version, node_id, state, body)
			SELECT gen_random_uuid(), 1, gen_random_uuid(), 'queued', '{}' FROM generate_series(1, 5000)`,
		`INSERT INTO readmodel.instance (instance_id, version, workspace_id, tenant_id, live, body)
			SELECT gen_random_uuid(), 1, gen_random_uuid(), md5((i % 50)::text)::uuid, true, '{}'
				FROM generate_series(1, 5000) i`,
	} {
		if _, err := db.Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.DB.OwnerPool().Exec(ctx,
		"ANALYZE readmodel.workspace, readmodel.task, readmodel.instance"); err != nil {
		t.Fatal(err)
	}
	tenant := ids.New()
	for _, tt := range []struct {
		kind   readmodelv1.ObjectKind
		scoped bool
		begin  string
	}{
		{readmodelv1.ObjectKind_OBJECT_KIND_TASK, false, "task_pkey"},
		{readmodelv1.ObjectKind_OBJECT_KIND_WORKSPACE, false, "workspace_pkey"},
		{readmodelv1.ObjectKind_OBJECT_KIND_WORKSPACE, true, "workspace_by_tenant_and_id"},
		{readmodelv1.ObjectKind_OBJECT_KIND_INSTANCE, true, "instance_by_tenant_and_id"},
	} {
		o := objects[tt.kind]
		for sql, want := range map[string]struct {
			from, to string
			index    string
		}{
			o.byBeginning(tt.scoped): {uuidText("0192f0", "0"), uuidText("0192f0", "f"), tt.begin},
			o.byEnd(tt.scoped):       {"0f2910", "0f2910g", o.table + "_by_end"},
		} {
			args := []any{want.from, want.to, Candidates + 1}
			if tt.scoped {
				args = append(args, tenant)
			}
			rows, err := db.Query(ctx, "EXPLAIN "+sql, args...)
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
			if tt.scoped && strings.Contains(plan.String(), tt.begin) {
				want.index = tt.begin // the tenant's own rows bound it as well
			}
			if strings.Contains(plan.String(), "Seq Scan on "+o.table) || !strings.Contains(plan.String(), want.index) {
				t.Errorf("%s scoped %t:\n%s\n%s", tt.kind, tt.scoped, sql, plan.String())
			}
		}
	}
}
