package castore

import (
	_ "embed"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// version is the version of functions.sql. It must be raised with each change of what a function there does.
const version = 2

// place names the schema of the authority's tables, and the role that owns the cutting functions and cannot log in.
// Roles belong to the whole server, so the role's name has the number of the database.
type place struct {
	Schema string `db:"schema"`
	Role   string `db:"role"`
	// HasRole is whether that role exists.
	HasRole bool `db:"has_role"`
	// Version is the version of the functions that exist; zero if there are none, or those of the first build.
	Version int `db:"version"`
}

// kind is one table of the authority whose rows expire.
type kind struct {
	name, table string
	// end is the name of the function that returns the time at which a row expires, from the row's value. The name ends
	// with the version in which the function last changed.
	end string
}

// index returns the name of the kind's index, which ends with the name of the function over which it is built.
func (k kind) index() string { return k.indexes() + k.end }

// indexes returns the prefix of the names of the kind's indexes of all versions.
func (k kind) indexes() string { return k.table + "_mesh_" }

// kinds are in the order in which they are cut.
var kinds = []kind{
	{name: "revocations", table: "revoked_x509_certs", end: "revocation_end_2"},
	{name: "certificates", table: "x509_certs", end: "certificate_end_2"},
	{name: "tokens", table: "used_ott", end: "token_end_2"},
}

// indexOf names one index of a kind, for the statements that need its name.
type indexOf struct {
	schema, name string
	kind         kind
}

// madeIndex is an index that exists.
type madeIndex struct {
	Name  string `db:"name"`
	Valid bool   `db:"valid"`
}

// elsewhere is the reason why none of these statements is prepared on the mesh's database.
const elsewhere = "it is of the authority's database"

var (
	//go:embed functions.sql
	functions string
	//go:embed rights.sql
	rights string
)

// fill replaces the placeholders in a text by the names of a place.
func (at place) fill(text string) string {
	return strings.NewReplacer(
		"@schema@", pgx.Identifier{at.Schema}.Sanitize(), "@role@", at.Role, "@version@", strconv.Itoa(version),
	).Replace(text)
}

var (
	findPlace = pg.DefineUnprepared(pg.RoleRecovery, "castore.find_place", elsewhere, func(struct{}) string {
		return `
		SELECT n.nspname AS schema, 'mesh_ca_retention_' || d.oid AS role, coalesce((
			SELECT substring(obj_description(s.oid, 'pg_namespace') FROM 'version ([0-9]+)')::integer
			FROM pg_namespace s WHERE s.nspname = 'mesh_ca'), 0) AS version,
			EXISTS (SELECT FROM pg_roles r WHERE r.rolname = 'mesh_ca_retention_' || d.oid) AS has_role
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace, pg_database d
		WHERE c.oid = to_regclass('x509_certs') AND d.datname = current_database()`
	})
	// From Postgres 16 on the creator of a role is a member of it that may grant it, without inheriting its rights.
	makeRole = pg.DefineUnprepared(pg.RoleRecovery, "castore.make_role", elsewhere, func(at place) string {
		return `
		DO $$
		BEGIN
			IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '` + at.Role + `') THEN
				CREATE ROLE ` + at.Role + ` NOLOGIN;
			END IF;
			IF current_setting('server_version_num')::integer < 160000 THEN
				IF NOT pg_has_role('` + at.Role + `', 'MEMBER') THEN
					EXECUTE format('GRANT ` + at.Role + ` TO %I', current_user);
				END IF;
			ELSIF NOT (pg_has_role('` + at.Role + `', 'SET') AND pg_has_role('` + at.Role + `', 'USAGE')) THEN
				EXECUTE format('GRANT ` + at.Role + ` TO %I WITH INHERIT TRUE, SET TRUE', current_user);
			END IF;
		EXCEPTION WHEN duplicate_object OR unique_violation THEN
			NULL; -- another replica makes it now
		END $$`
	})
	lockFunctions = pg.DefineUnprepared(pg.RoleRecovery, "castore.lock_functions", elsewhere, func(struct{}) string {
		return `SELECT pg_advisory_xact_lock(hashtextextended('mesh_ca', 0))`
	})
	makeFunctions = pg.DefineUnprepared(pg.RoleRecovery, "castore.make_functions", elsewhere,
		func(at place) string { return at.fill(functions) })
	grantRights = pg.DefineUnprepared(pg.RoleRecovery, "castore.grant_rights", elsewhere,
		func(at place) string { return at.fill(rights) })
	// A replica does not wait for the lock: a waiting statement has a snapshot, and the building of the index would wait
	// for that snapshot.
	tryLockIndexes = pg.DefineUnprepared(pg.RoleRecovery, "castore.try_lock_indexes", elsewhere, func(struct{}) string {
		return `SELECT pg_try_advisory_lock(hashtextextended('mesh_ca', 1))`
	})
	unlockIndexes = pg.DefineUnprepared(pg.RoleRecovery, "castore.unlock_indexes", elsewhere, func(struct{}) string {
		return `SELECT pg_advisory_unlock(hashtextextended('mesh_ca', 1))`
	})
	readIndexes = pg.DefineUnprepared(pg.RoleRecovery, "castore.read_indexes", elsewhere, func(struct{}) string {
		return `
		SELECT c.relname AS name, i.indisvalid AS valid
		FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_class t ON t.oid = i.indrelid
			JOIN pg_namespace n ON n.oid = t.relnamespace
		WHERE n.nspname = $1 AND t.relname = $2 AND starts_with(c.relname, $3)`
	})
	readSize = pg.DefineUnprepared(pg.RoleRecovery, "castore.read_size", elsewhere, func(at indexOf) string {
		return `SELECT pg_table_size(to_regclass('` + pgx.Identifier{at.schema, at.kind.table}.Sanitize() + `'))`
	})
	readProgress = pg.DefineUnprepared(pg.RoleRecovery, "castore.read_progress", elsewhere, func(at indexOf) string {
		return `
		SELECT p.phase || CASE WHEN p.blocks_total > 0
			THEN format(', %s of %s blocks', p.blocks_done, p.blocks_total) ELSE '' END
		FROM pg_stat_progress_create_index p WHERE p.datname = current_database()
			AND p.relid = to_regclass('` + pgx.Identifier{at.schema, at.kind.table}.Sanitize() + `')`
	})
	dropIndex = pg.DefineUnprepared(pg.RoleRecovery, "castore.drop_index", elsewhere, func(at indexOf) string {
		return `DROP INDEX CONCURRENTLY IF EXISTS ` + pgx.Identifier{at.schema, at.name}.Sanitize()
	})
	createIndex = pg.DefineUnprepared(pg.RoleRecovery, "castore.create_index", elsewhere, func(at indexOf) string {
		return `CREATE INDEX CONCURRENTLY ` + pgx.Identifier{at.name}.Sanitize() +
			` ON ` + pgx.Identifier{at.schema, at.kind.table}.Sanitize() + ` (mesh_ca.` + at.kind.end + `(nvalue))`
	})
	cutBatch = pg.DefineUnprepared(pg.RoleRecovery, "castore.cut_batch", elsewhere, func(k kind) string {
		return `SELECT mesh_ca.cut_ended_` + k.name + `($1, $2)`
	})
)
