package operation

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/schema"
)

// madeByATenant are the statements by which a tenant makes objects in its schema as its own role.
var madeByATenant = []string{
	`CREATE TABLE mine (n int PRIMARY KEY)`, `INSERT INTO mine SELECT generate_series(1, 3)`, `CREATE SEQUENCE numbers`,
	`CREATE VIEW seen AS SELECT key FROM kv`, `CREATE MATERIALIZED VIEW counted AS SELECT count(*) FROM mine`,
	`CREATE TYPE mood AS ENUM ('good')`, `CREATE FUNCTION one() RETURNS int LANGUAGE sql AS 'SELECT 1'`,
	`ALTER DEFAULT PRIVILEGES GRANT SELECT ON TABLES TO PUBLIC`, `REVOKE ALL ON mine FROM PUBLIC`,
	`INSERT INTO kv (key, value) VALUES ('a', '1')`, `SELECT lo_create(0)`,
}

// tenantOf makes a workspace, logs in as its role and runs madeByATenant.
func tenantOf(t *testing.T) (p *cluster, id, name string, conn *pgx.Conn) {
	t.Helper()
	p = newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	id = p.create(p.tenant(), "demo", byProcess)
	w := p.workspace(id)
	conn, err := p.login(id)
	if err != nil {
		t.Fatal(err)
	}
	for _, sql := range madeByATenant {
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	return p, id, schema.Name(w.Tenant, w.Name, id), conn
}

// TestWhatATenantMakesInItsSchemaOutlastsARecreate: the tenant's role owns it, and the administrator of workloads does
// not act for that role while the schema exists. A decommission drops it.
func TestWhatATenantMakesInItsSchemaOutlastsARecreate(t *testing.T) {
	p, id, name, _ := tenantOf(t)
	p.recreated(id)
	conn, err := p.login(id)
	if err != nil {
		t.Fatal(err)
	}
	var rows, keys int
	err = conn.QueryRow(t.Context(), `SELECT one() * (SELECT count(*) FROM mine), (SELECT count(*) FROM seen)`).Scan(&rows,
		&keys)
	if err != nil || rows != 3 || keys != 1 {
		t.Errorf("after a recreate the tenant has %d rows and %d keys: %v", rows, keys, err)
	}
	// The tenant reads and writes every table that is made for it.
	var closed int
	err = conn.QueryRow(t.Context(),
		`SELECT count(*) FROM pg_class c CROSS JOIN unnest('{SELECT,INSERT,UPDATE,DELETE}'::text[]) may
		WHERE c.relnamespace = to_regnamespace(quote_ident($1)) AND c.relkind = 'r'
			AND NOT has_table_privilege(c.oid, may)`, name).Scan(&closed)
	if err != nil || closed != 0 {
		t.Errorf("%d rights on the tables of the schema are missing: %v", closed, err)
	}
	if _, err := p.seats[0].ask(t.Context(), kDecommission, id); err != nil {
		t.Fatal(err)
	}
	p.rests(id, "decommissioned")
	admin := p.admin()
	if role, _, schema := p.mayLogIn(admin, id); role || schema {
		t.Errorf("after a decommission the role stands: %v, the schema: %v", role, schema)
	}
	var objects int
	err = admin.QueryRow(t.Context(),
		`SELECT (SELECT count(*) FROM pg_class WHERE relname IN ('mine', 'numbers', 'seen', 'counted'))
		+ (SELECT count(*) FROM pg_proc WHERE proname = 'one') + (SELECT count(*)
			FROM pg_largeobject_metadata)`).Scan(&objects)
	if err != nil || objects != 0 {
		t.Errorf("after a decommission %d objects of the tenant stand: %v", objects, err)
	}
}

// TestSessionsEndThoughTheLoginWasTakenBefore: another client took the login, and did not become a member of the role.
func TestSessionsEndThoughTheLoginWasTakenBefore(t *testing.T) {
	p, id, name, _ := tenantOf(t)
	quoted := pgx.Identifier{name}.Sanitize()
	p.schemas(`REVOKE ` + quoted + ` FROM CURRENT_USER`)
	p.schemas(`ALTER ROLE ` + quoted + ` NOLOGIN`)
	w := p.workspace(id)
	if err := schema.Disarm(t.Context(), p.workloads(), name,
		schema.Writer{WorkspaceID: id, Epoch: w.Epoch, OpSeq: w.OpSeq}); err != nil {
		t.Fatal(err)
	}
	admin := p.admin()
	testkit.Eventually(t, testkit.Patience, func() error {
		var n int
		err := admin.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE usename = $1`, name).Scan(&n)
		if err == nil && n != 0 {
			err = fmt.Errorf("%d sessions of the tenant are left", n)
		}
		return err
	})
	if err := schema.DropFenced(t.Context(), p.workloads(), name,
		schema.Writer{WorkspaceID: id, Epoch: w.Epoch, OpSeq: w.OpSeq}); err != nil {
		t.Fatal(err)
	}
	if role, _, schema := p.mayLogIn(admin, id); role || schema {
		t.Errorf("the role stands: %v, the schema: %v", role, schema)
	}
}
