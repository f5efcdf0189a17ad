package workspace_test

import (
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// TestReplicasOfTheBuildBeforeDropWhatThisOneMakes: they end sessions of a role and drop what it owns as members of it,
// which they were since they made it. This build does so where it is no member too.
func TestReplicasOfTheBuildBeforeDropWhatThisOneMakes(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	pool, err := pg.Open(ctx, pg.Config{URL: db.WorkloadURL()})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	id := ids.New()
	name := "t_member_" + id[len(id)-12:]
	if err := workspace.MakeSchema(ctx, pool, name, workspace.SchemaVerifier("password"), id); err != nil {
		t.Fatal(err)
	}
	count := func(sql string) int {
		t.Helper()
		var n int
		if err := pool.QueryRow(ctx, sql, name).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	if n := count(`SELECT count(*) FROM pg_auth_members m JOIN pg_roles r ON r.oid = m.roleid WHERE r.rolname = $1 AND pg_has_role(m.member, m.roleid, 'USAGE')`); n != 1 {
		t.Errorf("the role of a schema has %d members, want its maker", n)
	}
	if _, err := pool.Exec(ctx, "REVOKE "+pgx.Identifier{name}.Sanitize()+" FROM CURRENT_USER"); err != nil {
		t.Fatal(err)
	}
	if err := workspace.DropSchema(ctx, pool, name, id); err != nil {
		t.Fatal(err)
	}
	if n := count(`SELECT count(*) FROM pg_roles WHERE rolname = $1`); n != 0 {
		t.Error("the role stands after its schema was dropped")
	}
}
