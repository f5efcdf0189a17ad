package pg_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m, testkit.CheckLeaks()) }

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

func list(t *testing.T, q pg.Querier, sql string, args ...any) []string {
	t.Helper()
	rows, err := q.Query(t.Context(), sql, args...)
	if err != nil {
		t.Fatal(err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// allowed reports whether a role may run a statement on a shared table; everything on a table of the role's own schema
// is allowed, and everything else refused.
func allowed(role, schema, table, statement string) bool {
	service := role != pg.RoleSequencer
	switch schema + "." + table {
	case "events.event", "events.numbered":
		return statement == "SELECT"
	case "mesh.policy":
		return service && (statement == "SELECT" ||
			(role == pg.RoleRecovery && statement != "DELETE" && statement != "TRUNCATE"))
	case "mesh.era", "mesh.goose_db_version", "mesh.clock_offset":
		return statement == "SELECT"
	case "mesh.replica": // nodeapi writes its own rows, and all services read them
		return service && (statement == "SELECT" || (role == pg.RoleNodeAPI && statement != "TRUNCATE"))
	case "mesh.periodic_job": // each service that has periodic work sees its own rows
		return service && role != pg.RoleNodeAPI && statement != "DELETE" && statement != "TRUNCATE"
	case "mesh.key_replica": // each service keeps the rows of its own replicas
		return service && statement != "TRUNCATE"
	case "mesh.storage_sample": // recovery measures the free space of the database, and readmodel displays it
		return role == pg.RoleRecovery && (statement == "SELECT" || statement == "INSERT" || statement == "DELETE") ||
			role == pg.RoleReadmodel && statement == "SELECT"
	case "mesh.judged": // recovery notes up to when it has judged, and readmodel shows which verdicts are older
		return role == pg.RoleRecovery && statement != "DELETE" && statement != "TRUNCATE" ||
			role == pg.RoleReadmodel && statement == "SELECT"
	case "mesh.retention": // each service records its cuts, and deletes records of its own
		return service && statement != "TRUNCATE" && (statement != "DELETE" || role != pg.RoleNodeAPI)
	case "mesh.signing_key": // the service that signs with a kind adds its keys
		return service && (statement == "SELECT" || (statement == "INSERT" && role != pg.RoleNodeAPI))
	case "mesh.seeded": // a bench alone writes it, as the administrator
		return service && statement == "SELECT"
	case "mesh.key_rotation":
		return service && (statement == "SELECT" || (statement == "INSERT" && role == pg.RoleRecovery))
	case "mesh.key_rotation_repeat":
		return role == pg.RoleRecovery && (statement == "SELECT" || statement == "INSERT")
	case "readmodel.audit": // added to and never changed
		return role == pg.RoleReadmodel && (statement == "SELECT" || statement == "INSERT")
	case "readmodel.audit_checkpoint": // rows are added; only the signature of a row changes
		return role == pg.RoleReadmodel && (statement == "SELECT" || statement == "INSERT")
	case "readmodel.audit_head": // one row, which only moves
		return role == pg.RoleReadmodel && (statement == "SELECT" || statement == "UPDATE")
	case "recovery.rollback", "recovery.ca_preflight", "recovery.ca_preflight_lease", "recovery.authority_signs",
		"recovery.profile_head", "recovery.issuance_look":
		// one row, which is changed and never added to or taken away
		return role == pg.RoleRecovery && (statement == "SELECT" || statement == "UPDATE")
	case "recovery.authority_rotation", "recovery.profile", "recovery.profile_name": // the service takes none away
		return role == pg.RoleRecovery && statement != "DELETE" && statement != "TRUNCATE"
	case "lifecycle.row_evidence", "lifecycle.row_evidence_open": // triggers alone write them
		return role == pg.RoleLifecycle && statement == "SELECT"
	case "lifecycle.row_evidence_settled": // added to and never changed
		return role == pg.RoleLifecycle && (statement == "SELECT" || statement == "INSERT")
	}
	return schema == role && statement != "TRUNCATE"
}

// Every role, logged in as itself, tries every kind of statement on every table, those that later migrations add
// included.
func TestEachRoleIsRefusedEverywhereElse(t *testing.T) {
	testkit.IO(t)
	d := testkit.DB(t)
	owner := connect(t, d.AdminURL())
	type table struct{ schema, name, column, kind string }
	rows, err := owner.Query(t.Context(), `SELECT n.nspname, c.relname, (SELECT a.attname FROM pg_attribute a
			WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '' AND a.attidentity = ''
			ORDER BY a.attnum LIMIT 1), c.relkind::text
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast')
			ORDER BY 1, 2`)
	if err != nil {
		t.Fatal(err)
	}
	var tables []table
	var tb table
	if _, err := pgx.ForEachRow(rows, []any{&tb.schema, &tb.name, &tb.column, &tb.kind},
		func() error { tables = append(tables, tb); return nil }); err != nil {
		t.Fatal(err)
	}
	schemas := map[string]int{}
	for _, tb := range tables {
		schemas[tb.schema]++
	}
	for _, want := range []string{"events", "lifecycle", "mesh", "nodeapi", "readmodel", "recovery"} {
		if schemas[want] == 0 {
			t.Fatalf("no table in schema %s: the walk would prove nothing", want)
		}
	}
	for _, role := range pg.ServiceRoles() {
		conn := connect(t, d.URL(role))
		tried, refused := 0, 0
		for _, tb := range tables {
			name := pgx.Identifier{tb.schema, tb.name}.Sanitize()
			column := pgx.Identifier{tb.column}.Sanitize()
			if tb.name == "event" && tb.schema == "events" {
				column = "id" // the first that is not drawn by the database
			}
			for statement, sql := range map[string]string{
				"SELECT":   "SELECT FROM " + name + " LIMIT 1",
				"INSERT":   "INSERT INTO " + name + " SELECT * FROM " + name + " WHERE false",
				"UPDATE":   "UPDATE " + name + " SET " + column + " = " + column + " WHERE false",
				"DELETE":   "DELETE FROM " + name + " WHERE false",
				"TRUNCATE": "TRUNCATE " + name,
			} {
				if statement == "TRUNCATE" && tb.kind == "v" {
					continue // no view has rows to truncate, and none is asked for a right to
				}
				if statement == "INSERT" && allowed(role, tb.schema, tb.name, "SELECT") {
					// Without a select of its own, so that only the right to insert decides.
					sql = "INSERT INTO " + name + " (" + column + ") SELECT NULL WHERE false"
				}
				if statement == "UPDATE" {
					sql = "UPDATE " + name + " SET " + column + " = DEFAULT"
				}
				err := inRolledBack(t, conn, sql)
				tried++
				want := allowed(role, tb.schema, tb.name, statement)
				switch at := tb.schema + "." + tb.name; {
				case statement != "INSERT":
				case at == "events.event":
					want = role != pg.RoleSequencer // some columns; which is tested apart
				case at == "events.numbered":
					want = role == pg.RoleSequencer // likewise
				}
				if testkit.IsPrivilege(err) {
					refused++
				}
				if got := !testkit.IsPrivilege(err); got != want {
					t.Errorf("%s: %s on %s.%s: allowed %v, want %v (%v)", role, statement, tb.schema, tb.name, got, want, err)
				}
			}
		}
		t.Logf("%s: %d statements on %d tables, %d refused", role, tried, len(tables), refused)
	}
}

// inRolledBack runs sql in a transaction that leaves nothing behind.
func inRolledBack(t *testing.T, conn *pgx.Conn, sql string, args ...any) error {
	t.Helper()
	tx, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := tx.Rollback(context.Background()); err != nil {
			t.Fatal(err)
		}
	}()
	_, err = tx.Exec(t.Context(), sql, args...)
	return err
}

func TestRolesOwnAndCreateNothing(t *testing.T) {
	testkit.IO(t)
	d := testkit.DB(t)
	admin := connect(t, d.AdminURL())
	if owned := list(t, admin, `SELECT c.oid::regclass::text FROM pg_class c WHERE pg_get_userbyid(c.relowner) = ANY($1)
		UNION ALL SELECT p.oid::regprocedure::text FROM pg_proc p WHERE pg_get_userbyid(p.proowner) = ANY($1)
		UNION ALL SELECT n.nspname::text FROM pg_namespace n WHERE pg_get_userbyid(n.nspowner) = ANY($1)
		UNION ALL SELECT b.datname::text FROM pg_database b
			WHERE pg_get_userbyid(b.datdba) = ANY($1)`, pg.ServiceRoles()); len(owned) > 0 {
		t.Errorf("service roles own %v", owned)
	}
	if powerful := list(t, admin, `SELECT rolname::text FROM pg_roles WHERE rolname = ANY($1)
		AND (rolsuper OR rolcreatedb OR rolcreaterole OR rolreplication
			OR rolbypassrls)`, pg.ServiceRoles()); len(powerful) > 0 {
		t.Errorf("roles with powers: %v", powerful)
	}
	if members := list(t, admin, `SELECT member::regrole || ' in ' || roleid::regrole FROM pg_auth_members
		WHERE member::regrole::text = ANY($1) OR roleid::regrole::text = ANY($1)`, pg.ServiceRoles()); len(members) > 0 {
		t.Errorf("memberships: %v", members)
	}
	if definers := list(t, admin, `SELECT p.oid::regprocedure::text FROM pg_proc p
		JOIN pg_namespace n ON n.oid = p.pronamespace
		WHERE p.prosecdef AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND pg_get_userbyid(p.proowner) <> $1
		ORDER BY 1`, pg.RoleRetention); !slices.Equal(definers, []string{
		"events.keep_partitions(bigint)", "mesh.drop_parked_event(text,text,bigint)", "mesh.event_consumers(interval)",
		"mesh.forget_event_consumer(text,text,interval,interval,integer)", "mesh.oldest_parked()",
		"mesh.parked_events(text,text,text,text,bigint,integer)", "mesh.raise_era_after_rollback(text)",
		"mesh.replay_parked_events(text,text,bigint,integer)", "mesh.rolled_back()",
	}) {
		t.Errorf("functions that run with their owner's rights: %v", definers)
	}
	// The functions that cut belong to a role that owns nothing else, reads and deletes, and neither logs in nor has
	// members but the owner.
	if odd := list(t, admin, `SELECT p.oid::regprocedure::text FROM pg_proc p WHERE pg_get_userbyid(p.proowner) = $1
			AND (NOT p.prosecdef OR p.proname NOT LIKE 'cut\_%')
		UNION ALL SELECT c.oid::regclass::text FROM pg_class c WHERE pg_get_userbyid(c.relowner) = $1
		UNION ALL SELECT 'logs in' FROM pg_roles
			WHERE rolname = $1 AND (rolcanlogin OR rolsuper OR rolbypassrls OR rolcreaterole)
		UNION ALL SELECT member::regrole::text FROM pg_auth_members
			WHERE roleid::regrole::text = $1 AND member::regrole::text <> $2
			AND NOT (SELECT rolsuper FROM pg_roles WHERE oid = member)`, pg.RoleRetention, pg.RoleOwner); len(odd) > 0 {
		t.Errorf("of the role that cuts: %v", odd)
	}
	// They are the schema owner's or the cutting role's, take no names from the caller's search path, and are not
	// executable by PUBLIC.
	if loose := list(t, admin, `SELECT p.oid::regprocedure::text FROM pg_proc p
		JOIN pg_namespace n ON n.oid = p.pronamespace
		WHERE p.prosecdef AND n.nspname NOT IN ('pg_catalog', 'information_schema')
			AND (pg_get_userbyid(p.proowner) NOT IN ($1, $2)
			OR NOT COALESCE('search_path=pg_catalog, pg_temp' = ANY (p.proconfig), false)
			OR EXISTS (SELECT FROM aclexplode(p.proacl) a WHERE a.grantee = 0)
				OR p.proacl IS NULL)`, pg.RoleOwner, pg.RoleRetention); len(loose) > 0 {
		t.Errorf("functions that run with their owner's rights and are not closed: %v", loose)
	}
	schemas := list(t, admin, "SELECT nspname::text FROM pg_namespace WHERE nspname NOT LIKE 'pg\\_%'")
	for _, role := range pg.ServiceRoles() {
		conn := connect(t, d.URL(role))
		for _, schema := range schemas {
			if err := inRolledBack(t, conn,
				"CREATE TABLE "+pgx.Identifier{schema, "intruder"}.Sanitize()+" (a int)"); !testkit.IsPrivilege(err) {
				t.Errorf("%s creates in %s: %v", role, schema, err)
			}
		}
		for _, sql := range []string{
			"CREATE SCHEMA intruder", "CREATE TEMP TABLE intruder (a int)", "SET ROLE gpuaas_owner",
			"SET SESSION AUTHORIZATION recovery", "ALTER TABLE events.event DISABLE ROW LEVEL SECURITY",
			"UPDATE mesh.era SET era = era + 1", "ALTER ROLE lifecycle PASSWORD 'x'", "CREATE DATABASE intruder",
			"SET session_replication_role = replica",
			"COPY events.event TO PROGRAM 'true'",
		} {
			if role == pg.RoleRecovery && sql == "SET SESSION AUTHORIZATION recovery" {
				continue // itself
			}
			if role == pg.RoleLifecycle && sql == "ALTER ROLE lifecycle PASSWORD 'x'" {
				continue // every role may change its own
			}
			var err error
			if sql == "CREATE DATABASE intruder" {
				_, err = conn.Exec(t.Context(), sql)
			} else {
				err = inRolledBack(t, conn, sql)
			}
			if !testkit.IsPrivilege(err) {
				t.Errorf("%s runs %s: %v", role, sql, err)
			}
		}
	}
}

func TestEventsAreAppendOnlyAndSigned(t *testing.T) {
	testkit.IO(t)
	d := testkit.DB(t)
	const insert = `INSERT INTO events.event (id, source, kind, aggregate_type, aggregate_id, aggregate_version, payload)
		VALUES ($1, $2, 'k', 'a', 'a', 1, '{}')`
	services := []string{pg.RoleNodeAPI, pg.RoleLifecycle, pg.RoleRecovery, pg.RoleReadmodel}
	for _, role := range services {
		conn := connect(t, d.URL(role))
		if _, err := conn.Exec(t.Context(), insert, ids.New(), role); err != nil {
			t.Errorf("%s appends: %v", role, err)
		}
		for _, other := range append(slices.Clone(services), pg.RoleSequencer, pg.RoleOwner, "") {
			if other == role {
				continue
			}
			if err := inRolledBack(t, conn, insert, ids.New(), other); !testkit.IsPrivilege(err) {
				t.Errorf("%s appends as %q: %v", role, other, err)
			}
		}
		for _, sql := range []string{
			"UPDATE events.event SET seq = DEFAULT", "UPDATE events.event SET payload = '{}'", "DELETE FROM events.event",
			"TRUNCATE events.event", "INSERT INTO events.numbered (seqs, oldest) VALUES ('{[1,2)}', '1')",
			"INSERT INTO events.numbered (last_pos) VALUES (7)", "UPDATE events.numbered SET seqs = '{}'",
			"DELETE FROM events.numbered", "TRUNCATE events.numbered",
			`INSERT INTO events.event (id, kind, aggregate_type, aggregate_id, aggregate_version, payload, xid)
				VALUES (gen_random_uuid(), 'k', 'a', 'a', 1, '{}', '7')`,
			`INSERT INTO events.event (id, kind, aggregate_type, aggregate_id, aggregate_version, payload, created_at)
				VALUES (gen_random_uuid(), 'k', 'a', 'a', 1, '{}', 'epoch')`,
			`INSERT INTO events.event (seq, id, kind, aggregate_type, aggregate_id, aggregate_version, payload)
				OVERRIDING SYSTEM VALUE VALUES (7, gen_random_uuid(), 'k', 'a', 'a', 1, '{}')`,
		} {
			if err := inRolledBack(t, conn, sql); !testkit.IsPrivilege(err) {
				t.Errorf("%s runs %s: %v", role, sql, err)
			}
		}
		// An event names its kind and its aggregate, by type and id.
		for _, values := range []string{"'', 'a', 'a'", "'k', '', 'a'", "'k', 'a', ''"} {
			sql := `INSERT INTO events.event (id, aggregate_version, payload, kind, aggregate_type, aggregate_id)
				VALUES (gen_random_uuid(), 1, '{}', ` + values + `)`
			if err := inRolledBack(t, conn, sql); !testkit.IsPrivilege(err) {
				t.Errorf("%s appends %s: %v", role, values, err)
			}
		}
	}

	seq := connect(t, d.URL(pg.RoleSequencer))
	if err := inRolledBack(t, seq, insert, ids.New(), pg.RoleSequencer); !testkit.IsPrivilege(err) {
		t.Errorf("the sequencer appends: %v", err)
	}
	columns := func(table string) []string {
		return list(t, seq, `SELECT attname::text FROM pg_attribute
			WHERE attrelid = $1::regclass AND attnum > 0 AND attidentity = ''`, table)
	}
	for _, table := range []string{"events.event", "events.numbered"} {
		for _, column := range columns(table) {
			if err := inRolledBack(t, seq, "UPDATE "+table+" SET "+column+" = "+column); !testkit.IsPrivilege(err) {
				t.Errorf("the sequencer updates %s of %s: %v", column, table, err)
			}
		}
		if err := inRolledBack(t, seq, "DELETE FROM "+table); !testkit.IsPrivilege(err) {
			t.Errorf("the sequencer deletes from %s: %v", table, err)
		}
	}
	// The sequencer chooses events, and the database assigns the positions.
	for _, column := range columns("events.numbered") {
		err := inRolledBack(t, seq, "INSERT INTO events.numbered ("+column+") VALUES (NULL)")
		if free := column == "seqs" || column == "oldest"; testkit.IsPrivilege(err) == free {
			t.Errorf("the sequencer inserts %s: %v", column, err)
		}
	}
	const number = "INSERT INTO events.numbered (seqs, oldest) VALUES ($1, '1')"
	if _, err := seq.Exec(t.Context(), number, "{[2,3),[4,5)}"); err != nil {
		t.Fatalf("the sequencer numbers: %v", err)
	}
	if _, err := seq.Exec(t.Context(), number, "{[1,2)}"); err != nil {
		t.Fatalf("the sequencer numbers one that committed late: %v", err)
	}
	// A number is assigned once: events that have one are out of the sequencer's reach, and so are positions that no event
	// can have.
	for _, seqs := range []string{"{[2,3)}", "{[1,4)}", "{[3,5)}", "{}", "{[3,)}", "{(,2)}", "{[0,1)}"} {
		if err := inRolledBack(t, seq, number, seqs); err == nil || !strings.Contains(err.Error(), "numbered once") {
			t.Errorf("numbered %s: %v", seqs, err)
		}
	}
	if got := list(
		t, seq, "SELECT first_pos || '-' || last_pos || ' ' || seqs FROM events.numbered ORDER BY last_pos",
	); !slices.Equal(got,
		[]string{"1-2 {[2,3),[4,5)}", "3-3 {[1,2)}"}) {
		t.Errorf("numbered %q", got)
	}
	// The owner too is bound by the row policies.
	owner := connect(t, d.URL(pg.RoleOwner))
	var seen int
	if err := owner.QueryRow(t.Context(), "SELECT count(*) FROM events.event").Scan(&seen); err != nil || seen != 0 {
		t.Errorf("the owner sees %d events, %v", seen, err)
	}
}

func TestDatabasesAreClosedToTheOthers(t *testing.T) {
	testkit.IO(t)
	d := testkit.DB(t)
	workloads := d.WorkloadURL()
	for _, role := range pg.ServiceRoles() {
		url, err := pg.WithUser(workloads, role, "test-"+role, "")
		if err != nil {
			t.Fatal(err)
		}
		if err := dial(t, url); !testkit.IsPrivilege(err) {
			t.Errorf("%s connects to the workload database: %v", role, err)
		}
	}
	url, err := pg.WithUser(workloads, pg.RoleWorkloadAdmin, "test-"+pg.RoleWorkloadAdmin, d.Name())
	if err != nil {
		t.Fatal(err)
	}
	if err := dial(t, url); !testkit.IsPrivilege(err) {
		t.Errorf("workload_admin connects to the mesh database: %v", err)
	}
	// Its purpose: a login role and a schema for a workspace, which can access nothing but its own.
	conn := connect(t, workloads)
	role := fmt.Sprintf("ws_%s", ids.New()[24:])
	for _, sql := range []string{
		"CREATE ROLE " + role + " LOGIN PASSWORD 'w'", "GRANT " + role + " TO workload_admin",
		"CREATE SCHEMA " + role + " AUTHORIZATION " + role,
		"GRANT CONNECT ON DATABASE " + pgx.Identifier{conn.Config().Database}.Sanitize() + " TO " + role,
	} {
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	mine, err := pg.WithUser(workloads, role, "w", "")
	if err != nil {
		t.Fatal(err)
	}
	workspace := connect(t, mine)
	if _, err := workspace.Exec(t.Context(), "CREATE TABLE "+role+".t (a int)"); err != nil {
		t.Fatal(err)
	}
	if err := inRolledBack(t, workspace, "CREATE TABLE public.t (a int)"); !testkit.IsPrivilege(err) {
		t.Errorf("a workspace creates in public: %v", err)
	}
	other, err := pg.WithUser(workloads, role, "w", d.Name())
	if err != nil {
		t.Fatal(err)
	}
	if err := dial(t, other); !testkit.IsPrivilege(err) {
		t.Errorf("a workspace connects to the mesh database: %v", err)
	}
	for _, sql := range []string{"DROP OWNED BY " + role, "DROP ROLE " + role} {
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
}

func dial(t *testing.T, url string) error {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err == nil {
		_ = conn.Close(t.Context())
	}
	return err
}
