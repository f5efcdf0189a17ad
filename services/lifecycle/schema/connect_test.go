package schema

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestSchemaRolesAreAdmittedAsTheServerCanSay: before Postgres 16 a membership has no options.
func TestSchemaRolesAreAdmittedAsTheServerCanSay(t *testing.T) {
	for version, want := range map[int]string{
		150018: `GRANT workload_logins_5 TO "t_a"`,
		160000: `GRANT workload_logins_5 TO "t_a" WITH INHERIT TRUE, SET FALSE`,
		170002: `GRANT workload_logins_5 TO "t_a" WITH INHERIT TRUE, SET FALSE`,
	} {
		if got := (LoginGroup{Name: "workload_logins_5", Version: version}).Admit(`"t_a"`); got != want {
			t.Errorf("on Postgres %d the statement is %s, want %s", version, got, want)
		}
	}
}

// grants is a workload database with roles of workspaces as the previous build made them.
type grants struct {
	*pgxpool.Pool
	t *testing.T
}

// newGrants opens a workload database in which waits for a lock end after a second.
func newGrants(t *testing.T) grants {
	t.Helper()
	testkit.IO(t)
	cfg, err := pgxpool.ParseConfig(testkit.DB(t).WorkloadURL())
	if err != nil {
		t.Fatal(err)
	}
	cfg.ConnConfig.RuntimeParams["lock_timeout"] = "1s"
	pool, err := pgxpool.NewWithConfig(testkit.Context(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return grants{Pool: pool, t: t}
}

func (g grants) exec(statements ...string) {
	g.t.Helper()
	for _, sql := range statements {
		if _, err := g.Exec(context.WithoutCancel(testkit.Context(g.t)), sql); err != nil {
			g.t.Fatalf("%s: %v", sql, err)
		}
	}
}

func (g grants) is(sql, name string) bool {
	g.t.Helper()
	var is bool
	if err := g.QueryRow(testkit.Context(g.t), sql, name).Scan(&is); err != nil {
		g.t.Fatal(err)
	}
	return is
}

func (g grants) database() string {
	return pgx.Identifier{g.Config().ConnConfig.Database}.Sanitize()
}

// schema makes a schema, whose role goes when the test ends. If old is set, its role is as the previous build made it.
func (g grants) schema(kind string, old bool) string {
	g.t.Helper()
	id := ids.New()
	name := "t_" + kind + "_" + id[len(id)-12:]
	if err := MakeSchema(testkit.Context(g.t), g.Pool, name, SchemaVerifier("password"), id); err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() {
		if err := DropSchema(context.WithoutCancel(testkit.Context(g.t)), g.Pool, name, id); err != nil {
			g.t.Error(err)
		}
	})
	if old {
		g.exec("ALTER ROLE "+name+" NOINHERIT", "GRANT CONNECT ON DATABASE "+g.database()+" TO "+name)
	}
	return name
}

// inherits reads an attribute that a role has which was moved into the group, and that a role of the previous build
// does not have.
const inherits = `SELECT rolinherit FROM pg_roles WHERE rolname = $1`

// TestSchemasAreMadeWhileGrantsAreChanged: while another session holds the lock of grants, a schema is made
// without moving roles; the next schema moves them.
func TestSchemasAreMadeWhileGrantsAreChanged(t *testing.T) {
	db := newGrants(t)
	before := db.schema("before", true)
	tx, err := db.Begin(testkit.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	if err := ShareGrants(testkit.Context(t), tx); err != nil {
		t.Fatal(err)
	}
	db.schema("beside", false)
	if db.is(inherits, before) {
		t.Error("the role was moved while another transaction changed grants")
	}
	if err := tx.Rollback(testkit.Context(t)); err != nil {
		t.Fatal(err)
	}
	db.schema("after", false)
	if !db.is(inherits, before) {
		t.Error("the role was not moved after the other transaction")
	}
}

// TestSchemaRolesThatCannotBeMovedStay: if the query did not leave them out, it would return them for each schema that
// is made.
func TestSchemaRolesThatCannotBeMovedStay(t *testing.T) {
	db := newGrants(t)
	connect := "GRANT CONNECT ON DATABASE " + db.database() + " TO "
	temporary, dropped, passedOn := db.schema("temporary", true), db.schema("dropped", true), db.schema("passed", true)
	byAnother, moved := db.schema("another", true), db.schema("moved", true)
	for _, name := range []string{temporary, dropped, passedOn, byAnother} {
		db.exec("ALTER ROLE "+name+" NOINHERIT", "REVOKE CONNECT ON DATABASE "+db.database()+" FROM "+name)
	}
	db.exec("GRANT TEMPORARY ON DATABASE "+db.database()+" TO "+temporary,
		connect+dropped, "UPDATE gpuaas_fence.schema SET dropped = true WHERE name = '"+dropped+"'",
		connect+passedOn+" WITH GRANT OPTION", "GRANT "+passedOn+" TO CURRENT_USER")
	db.exec("BEGIN; SET LOCAL ROLE " + passedOn + "; " + connect + byAnother + "; COMMIT; REVOKE " + passedOn +
		" FROM CURRENT_USER")
	t.Cleanup(func() { db.exec("REVOKE CONNECT ON DATABASE " + db.database() + " FROM " + passedOn + " CASCADE") })
	db.schema("after", false)
	for what, name := range map[string]string{
		"with a right that is not to connect": temporary, "whose schema is dropped": dropped,
		"that passed its grant on": passedOn, "granted by another": byAnother,
	} {
		if db.is(inherits, name) {
			t.Errorf("the role %s was changed", what)
		}
	}
	if !db.is(inherits, moved) {
		t.Error("the role with a grant of its own was not moved")
	}
}

// TestSchemaRolesThatAreKeptHaveNoMembers: each role that workload_admin stays a member of costs every later session of
// it.
func TestSchemaRolesThatAreKeptHaveNoMembers(t *testing.T) {
	db := newGrants(t)
	const members = `SELECT EXISTS (SELECT FROM pg_auth_members m JOIN pg_roles r ON r.oid = m.roleid
		WHERE r.rolname = $1 AND to_jsonb(m) ->> 'inherit_option' IS DISTINCT FROM 'false')`
	id := ids.New()
	name := "t_kept_" + id[len(id)-12:]
	w := Writer{WorkspaceID: id, Epoch: 2, OpSeq: 1, RunID: ids.New()}
	apply := func(w Writer) {
		t.Helper()
		err := pg.InTx(testkit.Context(t), db, func(ctx context.Context, tx pgx.Tx) error {
			if err := PassFence(ctx, tx, name, w, false); err != nil {
				return err
			}
			_, err := Make(ctx, tx, name, SchemaVerifier("password"), w)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	undo := func(w Writer, wantKept bool) {
		t.Helper()
		kept, err := DropOwn(testkit.Context(t), db.Pool, name, w, func(note string) bool { return note == w.Note() })
		if err != nil || kept != wantKept {
			t.Fatalf("the schema was kept: %v, %v, want %v", kept, err, wantKept)
		}
		if !db.is(`SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1)`, name) {
			t.Fatal("the role was dropped")
		}
		if db.is(members, name) {
			t.Error("workload_admin is a member of the role that was kept")
		}
	}
	db.exec("CREATE ROLE " + name) // it existed before the run
	t.Cleanup(func() {
		w.OpSeq = 9
		if err := DropFenced(context.WithoutCancel(testkit.Context(t)), db.Pool, name, w); err != nil {
			t.Error(err)
		}
	})
	apply(w)
	another := w
	another.OpSeq, another.RunID = 2, ids.New()
	undo(another, true) // of a run that did not make the schema
	db.exec("DROP SCHEMA " + name + " CASCADE")
	w.OpSeq, w.RunID = 3, ids.New()
	apply(w)
	w.OpSeq = 4
	undo(w, false) // of the run that made the schema, and not its role
}
