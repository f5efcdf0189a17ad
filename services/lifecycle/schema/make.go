package schema

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/pg"
)

// Make makes the role and the schema of a workspace if they are not there, brings the schema up to date and
// returns its version. The transaction has the schema's fence.
func Make(ctx context.Context, tx pgx.Tx, name, verifier string, w Writer) (int, error) {
	id := pgx.Identifier{name}.Sanitize()
	version := 0
	exists, err := pg.One[struct {
		Role   bool `db:"has_role"`
		Schema bool `db:"has_schema"`
	}](ctx, tx, schemaAndRole, name)
	if err != nil {
		return 0, fmt.Errorf("read role and schema: %w", err)
	}
	// DDL takes no parameters. What stands there is the password's verifier: the password itself is in no statement, so in
	// no log either. Only a superuser may name the SUPERUSER attribute in an ALTER, even to deny it: a role has it only
	// from CREATE ROLE.
	ddl := "ALTER ROLE " + id + " LOGIN INHERIT"
	if !exists.Role {
		ddl = "CREATE ROLE " + id + " LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE INHERIT CONNECTION LIMIT 20"
	}
	ddl += " PASSWORD '" + verifier + "'"
	statements := []string{ddl}
	if !exists.Role && w.RunID != "" {
		statements = append(statements, "COMMENT ON ROLE "+id+" IS '"+w.Note()+"'")
	}
	if !exists.Schema {
		statements = append(statements, "CREATE SCHEMA "+id,
			"CREATE TABLE "+id+".schema_version (version integer PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now())")
	}
	if !exists.Schema && w.RunID != "" {
		statements = append(statements, "COMMENT ON SCHEMA "+id+" IS '"+w.Note()+"'")
	}
	statements = append(statements, "GRANT USAGE, CREATE ON SCHEMA "+id+" TO "+id,
		"ALTER ROLE "+id+" SET search_path = "+id,
		"ALTER ROLE "+id+" SET idle_in_transaction_session_timeout = '"+pg.IdleInTxTimeout+"'")
	for _, sql := range statements {
		if _, err := pg.Exec(ctx, tx, changeSchema.For(sql)); err != nil {
			return 0, fmt.Errorf("make role and schema: %w", err)
		}
	}
	if err := pg.QueryRow(ctx, tx, tenantSchemaVersion.For(id)).Scan(&version); err != nil {
		return 0, fmt.Errorf("read schema version: %w", err)
	}
	for n := version; n < len(tenantMigrations); n++ {
		if _, err := pg.Exec(ctx, tx, changeSchema.For(strings.ReplaceAll(tenantMigrations[n], "{schema}", id))); err != nil {
			return 0, fmt.Errorf("migration %d: %w", n+1, err)
		}
		if _, err := pg.Exec(ctx, tx, recordTenantMigration.For(id), n+1); err != nil {
			return 0, fmt.Errorf("record migration %d: %w", n+1, err)
		}
	}
	_, err = pg.Exec(ctx, tx, writeWorkspaceInfo.For(id), w.WorkspaceID, w.Epoch)
	if err != nil {
		return 0, fmt.Errorf("write workspace info: %w", err)
	}
	// By name: the tenant's role owns everything else in the schema, and only a member of that role can grant rights on
	// it.
	tables := id + "." + strings.Join(tenantTables, ", "+id+".")
	if _, err := pg.Exec(ctx, tx, changeSchema.For("GRANT SELECT, INSERT, UPDATE, DELETE ON "+tables+" TO "+
		id)); err != nil {
		return 0, fmt.Errorf("grant tables: %w", err)
	}
	if err := letConnect(ctx, tx, id); err != nil {
		return 0, err
	}
	return len(tenantMigrations), nil
}

// MakeSchema makes the role and the schema of a workspace as provisioning does, for benches; verifier is of the
// password that the role logs in with (see SchemaVerifier).
func MakeSchema(ctx context.Context, db *pgxpool.Pool, name, verifier, workspaceID string) error {
	w := Writer{WorkspaceID: workspaceID, Epoch: 1, OpSeq: 1}
	return pg.InTx(ctx, db, func(ctx context.Context, tx pgx.Tx) error {
		if err := PassFence(ctx, tx, name, w, false); err != nil {
			return err
		}
		_, err := Make(ctx, tx, name, verifier, w)
		return err
	})
}

// DropSchema drops the role and the schema of a workspace as decommissioning does, for benches.
func DropSchema(ctx context.Context, db *pgxpool.Pool, name, workspaceID string) error {
	return DropFenced(ctx, db, name, Writer{WorkspaceID: workspaceID, Epoch: 1, OpSeq: 2})
}

// SchemaVerifier returns what MakeSchema takes for a password.
func SchemaVerifier(password string) string {
	return Verifier(password, []byte(password + "0123456789abcdef")[:16])
}

// Name names the schema and the login role: t_<tenant>_<workspace>. A name that would not fit, or that two
// workspaces could share because hyphens become underscores, ends in a piece of the workspace's id.
func Name(tenant, workspace, workspaceID string) string {
	name := "t_" + tenant + "_" + workspace
	if strings.Contains(name, "-") || len(name) > 63 {
		tail := "_" + strings.ReplaceAll(workspaceID, "-", "")[20:]
		name = strings.ReplaceAll(name, "-", "_")
		name = name[:min(len(name), 63-len(tail))] + tail
	}
	return name
}

// tenantMigrations are applied to a workspace's own schema, in order. The schema records which were applied.
var tenantMigrations = []string{
	`CREATE TABLE {schema}.workspace_info (workspace_id uuid PRIMARY KEY, epoch bigint NOT NULL,
		created_at timestamptz NOT NULL DEFAULT now())`,
	`CREATE TABLE {schema}.kv (key text PRIMARY KEY, value jsonb NOT NULL, updated_at timestamptz NOT NULL DEFAULT now())`,
}

// tenantTables are the tables that exist after tenantMigrations; the tenant's role may read and write them.
var tenantTables = []string{"schema_version", "workspace_info", "kv"}

var schemaAndRole = pg.Define(pg.RoleWorkloadAdmin, "schema.schema_and_role",
	`SELECT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = $1) AS has_role,
		EXISTS (SELECT 1 FROM pg_namespace WHERE nspname = $1) AS has_schema`)

// inTenantSchema is why statements over the tables of a workspace's schema are not prepared on a migrated database.
const inTenantSchema = "it reads or writes a table in the schema of one workspace"

// The statements over the tables of a workspace's schema take its name, quoted.
var (
	tenantSchemaVersion = pg.DefineUnprepared(pg.RoleWorkloadAdmin, "schema.tenant_schema_version", inTenantSchema,
		func(schema string) string {
			return `SELECT coalesce(max(version), 0) FROM ` + schema + `.schema_version`
		})
	recordTenantMigration = pg.DefineUnprepared(pg.RoleWorkloadAdmin, "schema.record_tenant_migration", inTenantSchema,
		func(schema string) string {
			return `INSERT INTO ` + schema + `.schema_version (version) VALUES ($1)`
		})
	writeWorkspaceInfo = pg.DefineUnprepared(pg.RoleWorkloadAdmin, "schema.write_workspace_info", inTenantSchema,
		func(schema string) string {
			return `INSERT INTO ` + schema + `.workspace_info (workspace_id, epoch) VALUES ($1, $2)
			ON CONFLICT (workspace_id) DO UPDATE SET epoch = GREATEST(workspace_info.epoch, $2)`
		})
)
