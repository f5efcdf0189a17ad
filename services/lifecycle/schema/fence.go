package schema

import (
	"context"
	"crypto/hmac"
	"crypto/pbkdf2"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

// Writer identifies the writer of a schema, by the numbers that the schema's fence compares.
type Writer struct {
	WorkspaceID  string
	Epoch, OpSeq int64
	RunID        string // noted on what is made; empty outside of runs
}

// WriterOf returns the writer that the step of env is.
func WriterOf(env *saga.Env) Writer {
	return Writer{WorkspaceID: env.WorkspaceID, Epoch: env.Epoch, OpSeq: env.OpSeq, RunID: env.RunID}
}

var lockSchemaName = pg.Define(pg.RoleWorkloadAdmin, "schema.lock_schema_name",
	`SELECT pg_advisory_xact_lock(hashtextextended($1, 0))`)

// noFenceTable is why statements over the fence of schemas are not prepared on a migrated database.
const noFenceTable = "the first schema of a workspace makes the table"

var raiseFence = pg.DefineUnprepared(pg.RoleWorkloadAdmin, "schema.raise_fence", noFenceTable,
	func(struct{}) string {
		return `
		INSERT INTO gpuaas_fence.schema AS f (name, workspace_id, epoch, op_seq, dropped) VALUES ($1, $2, $3, $4, $5)
		ON CONFLICT (name) DO UPDATE SET workspace_id = $2, epoch = $3, op_seq = $4, dropped = $5
		WHERE f.workspace_id = $2 AND (f.epoch, f.op_seq) <= ($3, $4) OR f.workspace_id <> $2 AND f.dropped AND NOT $5
		RETURNING true`
	})

// PassFence lets a write of a schema through only if no later one has been, in the transaction that writes and at the
// database that is written: a driver that was paused past its lease is refused by the resource itself. The table keeps
// the highest (epoch, op_seq) of each name, and whether it was dropped; a name that was dropped may be another
// workspace's afterwards.
func PassFence(ctx context.Context, tx pgx.Tx, name string, w Writer, dropping bool) error {
	// One writer of a schema at a time, whichever driver it belongs to.
	if _, err := pg.Exec(ctx, tx, lockSchemaName, name); err != nil {
		return fmt.Errorf("lock schema: %w", err)
	}
	if err := fenceTable(ctx, tx); err != nil {
		return err
	}
	_, err := pg.Value[bool](ctx, tx, raiseFence.For(struct{}{}), name, w.WorkspaceID, w.Epoch, w.OpSeq, dropping)
	if errors.Is(err, pgx.ErrNoRows) {
		return passed()
	}
	if err != nil {
		return fmt.Errorf("compare fence of schema: %w", err)
	}
	return nil
}

func passed() error {
	return saga.Fail(commonv1.OwnerLayer_OWNER_LAYER_DATABASE, commonv1.Reason_REASON_TASK_SUPERSEDED,
		"the schema has seen a later operation", nil)
}

var lockGrants = pg.Define(pg.RoleWorkloadAdmin, "schema.lock_grants",
	`SELECT pg_advisory_xact_lock(hashtextextended('gpuaas_grants', 1))`)

// ShareGrants lets one transaction at a time change what the roles of all workspaces share in the workload database:
// the grants of the database itself. Postgres refuses a change that follows one which was not committed when it began.
// The lock is kept until the transaction ends, so it is taken as late in one as possible, and after the lock of the
// schema.
func ShareGrants(ctx context.Context, tx pgx.Tx) error {
	if _, err := pg.Exec(ctx, tx, lockGrants); err != nil {
		return fmt.Errorf("lock grants of the database: %w", err)
	}
	return nil
}

// disarmWait bounds how long taking a login away waits for a row that another transaction is writing.
const disarmWait = "2s"

var roleAndLogin = pg.Define(pg.RoleWorkloadAdmin, "schema.role_and_login", `
			SELECT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = $1) AS has_role,
				EXISTS (SELECT 1 FROM pg_roles WHERE rolname = $1 AND rolcanlogin) AS may_log_in`)

var boundLockWait = pg.Define(pg.RoleWorkloadAdmin, "schema.bound_lock_wait",
	`SET LOCAL lock_timeout = '`+disarmWait+`'`)

var lockFence = pg.DefineUnprepared(pg.RoleWorkloadAdmin, "schema.lock_fence", noFenceTable, func(struct{}) string {
	return `SELECT f.workspace_id = $2 AND (f.epoch, f.op_seq) <= ($3, $4) FROM gpuaas_fence.schema f WHERE f.name = $1
		FOR UPDATE`
})

// changeSchema makes, changes and drops the schema and the role of one workspace: DDL takes no parameters. Identifiers
// in it are quoted by the caller.
var changeSchema = pg.DefineUnprepared(pg.RoleWorkloadAdmin, "schema.change_schema",
	"it names the schema and the role of one workspace",
	func(ddl string) string { return ddl })

var endSessionsOfRole = pg.Define(pg.RoleWorkloadAdmin, "schema.end_sessions_of_role",
	`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = $1`)

// join makes workload_admin a member of the role of a schema, which it must be to end sessions of it and to drop what
// it owns. The membership ends with the role, or by leave.
func join(ctx context.Context, tx pgx.Tx, name string) error {
	if _, err := pg.Exec(ctx, tx, changeSchema.For("GRANT "+pgx.Identifier{name}.Sanitize()+
		" TO CURRENT_USER")); err != nil {
		return fmt.Errorf("become a member of the role: %w", err)
	}
	return nil
}

// leave ends the membership that join made, in a role that stands on: workload_admin is a member of one role at a time.
func leave(ctx context.Context, tx pgx.Tx, name string) error {
	if _, err := pg.Exec(ctx, tx, changeSchema.For("REVOKE "+pgx.Identifier{name}.Sanitize()+
		" FROM CURRENT_USER")); err != nil {
		return fmt.Errorf("end the membership of the role: %w", err)
	}
	return nil
}

// Disarm takes the login away from the role of a schema and ends its sessions, in transactions of their own: a drop may
// wait for a session that reads the schema, and until it is over the role cannot log in. Applying the schema again
// gives the login back. It waits for no lock on the schema, and changes nothing if no such role was ever made here.
func Disarm(ctx context.Context, db *pgxpool.Pool, name string, w Writer) error {
	err := asWriter(ctx, db, name, w, func(ctx context.Context, tx pgx.Tx, login bool) error {
		if !login {
			return nil
		}
		_, err := pg.Exec(ctx, tx, changeSchema.For("ALTER ROLE "+pgx.Identifier{name}.Sanitize()+" NOLOGIN"))
		return err
	})
	if err != nil {
		return fmt.Errorf("take login of role away: %w", err)
	}
	// Sessions end after the login is gone, so that none is opened again. The membership is made even where the login was
	// taken away by another replica or by hand: ending a session takes it, and they may not have made it.
	err = asWriter(ctx, db, name, w, func(ctx context.Context, tx pgx.Tx, _ bool) error {
		if err := join(ctx, tx, name); err != nil {
			return err
		}
		if _, err := pg.Exec(ctx, tx, endSessionsOfRole, name); err != nil {
			return err
		}
		return leave(ctx, tx, name)
	})
	if err != nil {
		return fmt.Errorf("end sessions of role: %w", err)
	}
	return nil
}

// asWriter changes the role of a schema if it exists and no later operation has written the schema; it passes to change
// whether the role may log in.
func asWriter(ctx context.Context, db *pgxpool.Pool, name string, w Writer,
	change func(ctx context.Context, tx pgx.Tx, login bool) error,
) error {
	return pg.InTx(ctx, db, func(ctx context.Context, tx pgx.Tx) error {
		fenced, err := pg.Value[bool](ctx, tx, fenceTableExists)
		if err != nil || !fenced {
			return err
		}
		if _, err := pg.Exec(ctx, tx, boundLockWait); err != nil {
			return err
		}
		// The row stays locked until the role is changed: a later operation that gives the login back comes after.
		mine, err := pg.Value[bool](ctx, tx, lockFence.For(struct{}{}), name, w.WorkspaceID, w.Epoch, w.OpSeq)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			return nil
		case err != nil:
			return err
		case !mine:
			return passed()
		}
		role, err := pg.One[struct {
			Exists bool `db:"has_role"`
			Login  bool `db:"may_log_in"`
		}](ctx, tx, roleAndLogin, name)
		if err != nil || !role.Exists {
			return err
		}
		return change(ctx, tx, role.Login)
	})
}

// DropFenced takes the login of a schema's role away, and then drops the schema and the role.
func DropFenced(ctx context.Context, db *pgxpool.Pool, name string, w Writer) error {
	if err := Disarm(ctx, db, name, w); err != nil {
		return err
	}
	return pg.InTx(ctx, db, func(ctx context.Context, tx pgx.Tx) error {
		if err := PassFence(ctx, tx, name, w, true); err != nil {
			return err
		}
		return Drop(ctx, tx, name, false)
	})
}

var makersOfSchema = pg.Define(pg.RoleWorkloadAdmin, "schema.makers_of_schema", `
		SELECT n.oid IS NOT NULL AS has_schema, coalesce(obj_description(n.oid, 'pg_namespace'), '') AS schema_note,
			coalesce(shobj_description(r.oid, 'pg_authid'), '') AS role_note
		FROM (SELECT $1::name AS name) x LEFT JOIN pg_namespace n ON n.nspname = x.name
			LEFT JOIN pg_roles r ON r.rolname = x.name`)

// DropOwn takes the login of a schema's role away, and then drops both if own returns true for the note that is on
// them. It reports whether the schema was kept; a comment on a kept schema names the operation. A role that is kept has
// no login.
func DropOwn(ctx context.Context, db *pgxpool.Pool, name string, w Writer, own func(note string) bool) (bool, error) {
	if err := Disarm(ctx, db, name, w); err != nil {
		return false, err
	}
	kept := false
	err := pg.InTx(ctx, db, func(ctx context.Context, tx pgx.Tx) error {
		if err := PassFence(ctx, tx, name, w, false); err != nil {
			return err
		}
		made, err := pg.One[struct {
			Schema     bool   `db:"has_schema"`
			SchemaNote string `db:"schema_note"`
			RoleNote   string `db:"role_note"`
		}](ctx, tx, makersOfSchema, name)
		if err != nil {
			return fmt.Errorf("read makers of schema: %w", err)
		}
		if kept = made.Schema && !own(made.SchemaNote); kept {
			note := "COMMENT ON SCHEMA " + pgx.Identifier{name}.Sanitize() + " IS 'kept by operation " + w.RunID + "'"
			if _, err := pg.Exec(ctx, tx, changeSchema.For(note)); err != nil {
				return fmt.Errorf("note that schema is kept: %w", err)
			}
			return nil
		}
		if err := PassFence(ctx, tx, name, w, true); err != nil {
			return err
		}
		return Drop(ctx, tx, name, !own(made.RoleNote))
	})
	return kept, err
}

// Note is the comment that a run leaves on the schema and the role that it makes, in the transaction that makes them.
func (w Writer) Note() string { return "made by operation " + w.RunID + w.InEpoch() }

// InEpoch is the part of the note that names the epoch.
func (w Writer) InEpoch() string { return " in epoch " + strconv.FormatInt(w.Epoch, 10) }

var holderOfSchema = pg.DefineUnprepared(pg.RoleWorkloadAdmin, "schema.holder_of_schema", noFenceTable,
	func(struct{}) string {
		return `SELECT f.workspace_id::text FROM gpuaas_fence.schema f WHERE f.name = $1`
	})

// HolderOf returns the id of the workspace that a name in the workload database belongs to, by its fence; empty if
// no writer ever wrote it.
func HolderOf(ctx context.Context, db *pgxpool.Pool, name string) (string, error) {
	workspace, err := pg.Value[string](ctx, db, holderOfSchema.For(struct{}{}), name)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return "", fmt.Errorf("read fence of schema: %w", err)
	}
	return workspace, nil
}

var fenceTableExists = pg.Define(pg.RoleWorkloadAdmin, "schema.fence_table_exists",
	`SELECT to_regclass('gpuaas_fence.schema') IS NOT NULL`)

var makeFenceTable = pg.DefineUnprepared(pg.RoleWorkloadAdmin, "schema.make_fence_table",
	"it is several commands in one text", func(struct{}) string {
		return `
		SELECT pg_advisory_xact_lock(hashtextextended('gpuaas_fence', 0));
		CREATE SCHEMA IF NOT EXISTS gpuaas_fence;
		CREATE TABLE IF NOT EXISTS gpuaas_fence.schema (
			name text PRIMARY KEY, workspace_id uuid NOT NULL, epoch bigint NOT NULL, op_seq bigint NOT NULL,
				dropped boolean NOT NULL)`
	})

func fenceTable(ctx context.Context, tx pgx.Tx) error {
	there, err := pg.Value[bool](ctx, tx, fenceTableExists)
	if err != nil || there {
		return err
	}
	_, err = pg.Exec(ctx, tx, makeFenceTable.For(struct{}{}))
	if err != nil {
		return fmt.Errorf("make fence of schemas: %w", err)
	}
	return nil
}

// scramIterations is the iteration count that Postgres itself uses for SCRAM-SHA-256.
const scramIterations = 4096

// Verifier returns the verifier that Postgres keeps of a password (RFC 5803): enough to check it, not enough to
// log in with.
func Verifier(password string, salt []byte) string {
	salted, err := pbkdf2.Key(sha256.New, password, salt, scramIterations, sha256.Size)
	if err != nil {
		salted = make([]byte, sha256.Size) // only for a key length other than this one: no client could log in
	}
	mac := func(key []byte, text string) []byte {
		m := hmac.New(sha256.New, key)
		m.Write([]byte(text))
		return m.Sum(nil)
	}
	stored := sha256.Sum256(mac(salted, "Client Key"))
	b64 := base64.StdEncoding.EncodeToString
	return fmt.Sprintf("SCRAM-SHA-256$%d:%s$%s:%s", scramIterations, b64(salt), b64(stored[:]),
		b64(mac(salted, "Server Key")))
}
