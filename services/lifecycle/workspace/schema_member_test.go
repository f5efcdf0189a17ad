package workspace_test

import (
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// TestTheAdministratorIsNoMemberOfRolesThatStand: with as many memberships as there are workspaces, each statement that
// checks a privilege costs their number squared. What it drops it becomes a member of first.
func TestTheAdministratorIsNoMemberOfRolesThatStand(t *testing.T) {
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
	// From 16 on who makes a role is a member that may give it away and has none of its rights: it counts for nothing.
	members := func(of string) {
		t.Helper()
		if n := count(`SELECT count(*) FROM pg_auth_members m JOIN pg_roles r ON r.oid = m.roleid
			WHERE r.rolname = $1 AND to_jsonb(m) ->> 'inherit_option' IS DISTINCT FROM 'false'`); n != 0 {
			t.Errorf("the role of a schema %s has %d members", of, n)
		}
	}
	members("that stands")
	// Builds before this one made it a member of each.
	if _, err := pool.Exec(ctx, "GRANT "+pgx.Identifier{name}.Sanitize()+" TO CURRENT_USER"); err != nil {
		t.Fatal(err)
	}
	if err := workspace.MakeSchema(ctx, pool, name, workspace.SchemaVerifier("password"), id); err != nil {
		t.Fatal(err)
	}
	members("of an earlier build")
	if err := workspace.DropSchema(ctx, pool, name, id); err != nil {
		t.Fatal(err)
	}
	if n := count(`SELECT count(*) FROM pg_roles WHERE rolname = $1`); n != 0 {
		t.Error("the role stands after its schema was dropped")
	}
}
