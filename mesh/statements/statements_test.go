package statements_test

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// unprepared are the statements that name objects that are made while the product runs; each has its reason in its
// definition.
var unprepared = []string{
	"castore.create_index", "castore.cut_batch", "castore.drop_index", "castore.find_place", "castore.grant_rights",
	"castore.lock_functions", "castore.make_functions", "castore.make_role", "castore.read_indexes",
	"castore.read_progress", "castore.read_size", "castore.try_lock_indexes", "castore.unlock_indexes",
	"detect.fenced_schemas", "idle.create_inspect", "idle.create_statements", "idle.read_records",
	"idle.read_statements", "idle.reset_statements", "idle.vacuum_again", "idle.vacuum_all",
	"plans.fence_schemas", "plans.schemas_there",
	"reconnect.create_statements", "reconnect.read_statements", "reconnect.reset_statements",
	"rig.insert_commit",
	"schema.change_schema", "schema.holder_of_schema", "schema.lock_fence", "schema.make_fence_table",
	"schema.make_logins", "schema.raise_fence", "schema.record_tenant_migration", "schema.roles_have_grants",
	"schema.roles_with_grants", "schema.tenant_schema_version", "schema.write_workspace_info",
	"schemas.own_tables",
}

// TestEveryStatementIsPreparedAsItsRole: a statement that names a column which is gone, or a table which its role may
// not read, is found here and not by the first operator who needs it.
func TestEveryStatementIsPreparedAsItsRole(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	workloads, err := pg.Open(ctx, pg.Config{URL: db.WorkloadURL(), ApplicationName: "test statements"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(workloads.Close)
	var without []string
	for i, s := range pg.Statements() {
		if s.Unprepared() != "" {
			without = append(without, s.Name())
			continue
		}
		for _, role := range s.Roles() {
			pool := workloads
			if role != pg.RoleWorkloadAdmin {
				pool = db.Pool(role)
			}
			err := pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
				return plan(ctx, conn.Conn(), fmt.Sprintf("s%d", i), s.SQL())
			})
			if err != nil {
				t.Errorf("%s as %s: %v\n%s", s.Name(), role, err, s.SQL())
			}
		}
	}
	if !slices.Equal(without, unprepared) {
		t.Errorf("not prepared are %q, want %q", without, unprepared)
	}
}

// plan prepares a statement and has the server plan and start it, without running it: privileges are checked no
// earlier.
func plan(ctx context.Context, conn *pgx.Conn, name, sql string) error {
	prepared, err := conn.Prepare(ctx, name, sql)
	if err != nil {
		return err
	}
	if !planned.MatchString(sql) {
		return nil // a utility command has no plan
	}
	call := "EXPLAIN EXECUTE " + name
	if n := len(prepared.ParamOIDs); n > 0 {
		call += "(" + strings.Repeat("NULL, ", n-1) + "NULL)"
	}
	_, err = conn.Exec(ctx, call)
	return err
}

// planned are the statements that have a plan, behind the comment with their name.
var planned = regexp.MustCompile(`(?is)^/\*[^*]*\*/\s*(select|insert|update|delete|with|values|merge)\b`)

// TestAMissingPrivilegeIsFound checks that plan detects a missing privilege.
func TestAMissingPrivilegeIsFound(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	const undefinedColumn, insufficientPrivilege = "42703", "42501"
	for i, c := range []struct{ sql, code string }{
		{"/* x */ SELECT key FROM mesh.policy WHERE key = $1", ""},
		{"/* x */ SELECT nokey FROM mesh.policy", undefinedColumn},
		{"/* x */ UPDATE mesh.policy SET value = $1 WHERE key = $2", insufficientPrivilege}, // recovery's alone
		{"/* x */ SELECT workspace_id FROM readmodel.workspace WHERE name = $1", insufficientPrivilege},
	} {
		err := db.Pool(pg.RoleLifecycle).AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
			return plan(ctx, conn.Conn(), fmt.Sprintf("probe%d", i), c.sql)
		})
		var refused *pgconn.PgError
		if errors.As(err, &refused); (err == nil) != (c.code == "") || refused != nil && refused.Code != c.code {
			t.Errorf("%s: %v, want code %q", c.sql, err, c.code)
		}
	}
}
