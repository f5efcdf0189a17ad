package schema_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/schema"
)

// workloads opens the workload database of a test.
func workloads(t *testing.T, db *testkit.Database) *pgxpool.Pool {
	t.Helper()
	pool, err := pg.Open(testkit.Context(t), pg.Config{URL: db.WorkloadURL()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

func countOf(ctx context.Context, t *testing.T, pool *pgxpool.Pool, sql string, args ...any) int {
	t.Helper()
	var n int
	if err := pool.QueryRow(ctx, sql, args...).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

const (
	rightfulMembers = `SELECT count(*) FROM pg_auth_members m JOIN pg_roles r ON r.oid = m.roleid
		WHERE r.rolname = $1 AND pg_has_role(m.member, m.roleid, 'USAGE')`
	grantsOfDatabase = `SELECT count(*) FROM pg_database d CROSS JOIN aclexplode(d.datacl)
		WHERE d.datname = current_database()`
)

// TestASchemaAddsNothingToWhatAllShare: a role of a workspace connects through a group, and workload_admin is no member
// of it; otherwise each schema would cost more than the one before.
func TestASchemaAddsNothingToWhatAllShare(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	pool := workloads(t, db)
	var grants []int
	for n := range 3 {
		id := ids.New()
		name := fmt.Sprintf("t_flat_%d_%s", n, id[len(id)-12:])
		if err := schema.MakeSchema(ctx, pool, name, schema.SchemaVerifier("password"), id); err != nil {
			t.Fatal(err)
		}
		if n := countOf(ctx, t, pool, rightfulMembers, name); n != 0 {
			t.Errorf("the role of a schema has %d members, want none", n)
		}
		if err := login(ctx, t, pool, name).Close(ctx); err != nil {
			t.Fatal(err)
		}
		grants = append(grants, countOf(ctx, t, pool, grantsOfDatabase))
		t.Cleanup(func() {
			if err := schema.DropSchema(context.WithoutCancel(ctx), pool, name, id); err != nil {
				t.Error(err)
			}
			if n := countOf(context.WithoutCancel(ctx), t, pool, `SELECT count(*) FROM pg_roles WHERE rolname = $1`,
				name); n != 0 {
				t.Error("the role stands after its schema was dropped")
			}
		})
	}
	if grants[2] != grants[0] {
		t.Errorf("after each schema the database has %v grants, want as many after each", grants)
	}
}

// groupOf returns the group through which the roles of a workload database connect.
func groupOf(ctx context.Context, t *testing.T, pool *pgxpool.Pool) string {
	t.Helper()
	return fmt.Sprintf("workload_logins_%d",
		countOf(ctx, t, pool, `SELECT oid::int FROM pg_database WHERE datname = current_database()`))
}

// login opens a session of the role of a schema that MakeSchema made with the verifier of "password".
func login(ctx context.Context, t *testing.T, pool *pgxpool.Pool, name string) *pgx.Conn {
	t.Helper()
	cfg := pool.Config().ConnConfig.Copy()
	cfg.User, cfg.Password = name, "password"
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		t.Fatalf("the role of a workspace logs in: %v", err)
	}
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(ctx)) })
	return conn
}

// made makes a schema, which the cleanup of the test drops, and returns its name.
func made(ctx context.Context, t *testing.T, pool *pgxpool.Pool, kind string) string {
	t.Helper()
	id := ids.New()
	name := "t_" + kind + "_" + id[len(id)-12:]
	if err := schema.MakeSchema(ctx, pool, name, schema.SchemaVerifier("password"), id); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := schema.DropSchema(context.WithoutCancel(ctx), pool, name, id); err != nil {
			t.Error(err)
		}
	})
	return name
}

// TestSchemasOfTwoMeshesOnOneServerConnectToTheirOwnDatabase: roles belong to the server, not to one database.
func TestSchemasOfTwoMeshesOnOneServerConnectToTheirOwnDatabase(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	one, two := workloads(t, testkit.DB(t)), workloads(t, testkit.DB(t))
	name := made(ctx, t, one, "one")
	made(ctx, t, two, "two")
	const mayConnect = `SELECT has_database_privilege($1, current_database(), 'CONNECT')::int`
	if countOf(ctx, t, one, mayConnect, name) != 1 {
		t.Error("the role of a workspace may not connect to the database of its mesh")
	}
	if countOf(ctx, t, two, mayConnect, name) != 0 {
		t.Error("the role of a workspace may connect to the database of another mesh")
	}
}

// TestSchemaRolesDoNotBecomeTheGroup checks that the roles of schemas cannot SET ROLE to the group, on servers where a
// membership can exclude that.
func TestSchemaRolesDoNotBecomeTheGroup(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	pool := workloads(t, testkit.DB(t))
	conn := login(ctx, t, pool, made(ctx, t, pool, "member"))
	_, err := conn.Exec(ctx, "SET ROLE "+groupOf(ctx, t, pool))
	if version := countOf(ctx, t, pool,
		`SELECT current_setting('server_version_num')::int`); (err == nil) != (version < 160000) {
		t.Errorf("on Postgres %d the role of a workspace becomes the group: %v", version, err)
	}
}

// TestRolesOfTheBuildBeforeConnectThroughTheGroup checks that a role of the build before, which granted the database to
// each role and was its member, connects through the group.
func TestRolesOfTheBuildBeforeConnectThroughTheGroup(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	pool := workloads(t, db)
	before := made(ctx, t, pool, "before")
	role := pgx.Identifier{before}.Sanitize()
	database := pgx.Identifier{pool.Config().ConnConfig.Database}.Sanitize()
	for _, sql := range []string{
		"GRANT CONNECT ON DATABASE " + database + " TO " + role, "GRANT " + role + " TO CURRENT_USER",
		"REVOKE " + groupOf(ctx, t, pool) + " FROM " + role, "ALTER ROLE " + role + " NOINHERIT",
	} {
		if _, err := pool.Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	made(ctx, t, pool, "after")
	if n := countOf(ctx, t, pool, grantsOfDatabase+` AND grantee = to_regrole($1)`, role); n != 0 {
		t.Error("the role of the build before has a grant of its own still")
	}
	if n := countOf(ctx, t, pool, rightfulMembers, before); n != 0 {
		t.Errorf("the role of the build before has %d members still", n)
	}
	var may bool
	if err := pool.QueryRow(ctx, `SELECT has_database_privilege($1, current_database(), 'CONNECT')`,
		before).Scan(&may); err != nil || !may {
		t.Errorf("the role of the build before may connect: %v, %v", may, err)
	}
}
