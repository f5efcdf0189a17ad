package castore

import (
	_ "embed"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// place is where the tables of the authority are, and the role that owns the functions that cut and never logs in. Roles
// are of a whole server, so its name has the number of the database.
type place struct {
	Schema string `db:"schema"`
	Role   string `db:"role"`
}

// kind is one table of the authority whose rows end.
type kind struct {
	name, table string
	// end is the function that reads from a row's value when it is over.
	end string
}

func (k kind) index() string { return k.table + "_mesh_end" }

// kinds are in the order in which they are cut.
var kinds = []kind{
	{name: "revocations", table: "revoked_x509_certs", end: "revocation_end"},
	{name: "certificates", table: "x509_certs", end: "certificate_end"},
	{name: "tokens", table: "used_ott", end: "token_end"},
}

type indexOf struct {
	schema string
	kind   kind
}

// elsewhere is why none of these statements is prepared on the mesh's database.
const elsewhere = "it is of the authority's database"

//go:embed functions.sql
var functions string

var (
	findPlace = pg.DefineUnprepared(pg.RoleRecovery, "castore.find_place", elsewhere, func(struct{}) string {
		return `
		SELECT n.nspname AS schema, 'mesh_ca_retention_' || d.oid AS role
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace, pg_database d
		WHERE c.oid = to_regclass('x509_certs') AND d.datname = current_database()`
	})
	makeRole = pg.DefineUnprepared(pg.RoleRecovery, "castore.make_role", elsewhere, func(at place) string {
		return `
		DO $$
		BEGIN
			IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '` + at.Role + `') THEN
				CREATE ROLE ` + at.Role + ` NOLOGIN;
			END IF;
			IF NOT pg_has_role('` + at.Role + `', 'MEMBER') THEN
				EXECUTE format('GRANT ` + at.Role + ` TO %I', current_user);
			END IF;
		EXCEPTION WHEN duplicate_object OR unique_violation THEN
			NULL; -- another replica makes it now
		END $$`
	})
	makeFunctions = pg.DefineUnprepared(pg.RoleRecovery, "castore.make_functions", elsewhere, func(at place) string {
		return strings.NewReplacer("@schema@", pgx.Identifier{at.Schema}.Sanitize(), "@role@", at.Role).Replace(functions)
	})
	indexIsValid = pg.DefineUnprepared(pg.RoleRecovery, "castore.index_is_valid", elsewhere, func(struct{}) string {
		return `
		SELECT i.indisvalid FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname = $1 AND c.relname = $2`
	})
	dropIndex = pg.DefineUnprepared(pg.RoleRecovery, "castore.drop_index", elsewhere, func(at indexOf) string {
		return `DROP INDEX CONCURRENTLY ` + pgx.Identifier{at.schema, at.kind.index()}.Sanitize()
	})
	createIndex = pg.DefineUnprepared(pg.RoleRecovery, "castore.create_index", elsewhere, func(at indexOf) string {
		return `CREATE INDEX CONCURRENTLY ` + pgx.Identifier{at.kind.index()}.Sanitize() +
			` ON ` + pgx.Identifier{at.schema, at.kind.table}.Sanitize() + ` (mesh_ca.` + at.kind.end + `(nvalue))`
	})
	cutBatch = pg.DefineUnprepared(pg.RoleRecovery, "castore.cut_batch", elsewhere, func(k kind) string {
		return `SELECT mesh_ca.cut_` + k.name + `($1, $2)`
	})
)
