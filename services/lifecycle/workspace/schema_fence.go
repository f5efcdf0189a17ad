package workspace

import (
	"context"
	"crypto/hmac"
	"crypto/pbkdf2"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

// fence lets a write of a schema through only if no later one has been, in the transaction that writes and at the database that is written: a driver
// that was paused past its lease is refused by the resource itself. The table keeps the highest (epoch, op_seq) of each name, and whether it was dropped;
// a name that was dropped may be another workspace's afterwards.
func fence(ctx context.Context, tx pgx.Tx, name string, env *saga.Env, dropping bool) error {
	// One writer of a schema at a time, whichever driver it is of.
	if _, err := tx.Exec(ctx, `SELECT pg_advisory_xact_lock(hashtextextended($1, 0))`, name); err != nil {
		return fmt.Errorf("lock schema: %w", err)
	}
	if err := fenceTable(ctx, tx); err != nil {
		return err
	}
	var mine bool
	err := tx.QueryRow(ctx, `
		INSERT INTO gpuaas_fence.schema AS f (name, workspace_id, epoch, op_seq, dropped) VALUES ($1, $2, $3, $4, $5)
		ON CONFLICT (name) DO UPDATE SET workspace_id = $2, epoch = $3, op_seq = $4, dropped = $5
		WHERE f.workspace_id = $2 AND (f.epoch, f.op_seq) <= ($3, $4) OR f.workspace_id <> $2 AND f.dropped AND NOT $5
		RETURNING true`, name, env.WorkspaceID, env.Epoch, env.OpSeq, dropping).Scan(&mine)
	if errors.Is(err, pgx.ErrNoRows) {
		return saga.Fail(commonv1.OwnerLayer_OWNER_LAYER_DATABASE, commonv1.Reason_REASON_TASK_SUPERSEDED, "the schema has seen a later operation", nil)
	}
	if err != nil {
		return fmt.Errorf("compare fence of schema: %w", err)
	}
	return nil
}

func fenceTable(ctx context.Context, tx pgx.Tx) error {
	var there bool
	if err := tx.QueryRow(ctx, `SELECT to_regclass('gpuaas_fence.schema') IS NOT NULL`).Scan(&there); err != nil || there {
		return err //nolint:wrapcheck // nil, or the connection's own
	}
	_, err := tx.Exec(ctx, `
		SELECT pg_advisory_xact_lock(hashtextextended('gpuaas_fence', 0));
		CREATE SCHEMA IF NOT EXISTS gpuaas_fence;
		CREATE TABLE IF NOT EXISTS gpuaas_fence.schema (
			name text PRIMARY KEY, workspace_id uuid NOT NULL, epoch bigint NOT NULL, op_seq bigint NOT NULL, dropped boolean NOT NULL)`)
	if err != nil {
		return fmt.Errorf("make fence of schemas: %w", err)
	}
	return nil
}

// scramIterations is what Postgres itself uses for SCRAM-SHA-256.
const scramIterations = 4096

// scramVerifier is what Postgres keeps of a password (RFC 5803): enough to check it, not enough to log in with.
func scramVerifier(password string, salt []byte) string {
	salted, err := pbkdf2.Key(sha256.New, password, salt, scramIterations, sha256.Size)
	if err != nil {
		salted = make([]byte, sha256.Size) // only for a length that is not ours: nobody could log in
	}
	mac := func(key []byte, text string) []byte {
		m := hmac.New(sha256.New, key)
		m.Write([]byte(text))
		return m.Sum(nil)
	}
	stored := sha256.Sum256(mac(salted, "Client Key"))
	b64 := base64.StdEncoding.EncodeToString
	return fmt.Sprintf("SCRAM-SHA-256$%d:%s$%s:%s", scramIterations, b64(salt), b64(stored[:]), b64(mac(salted, "Server Key")))
}
