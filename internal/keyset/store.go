package keyset

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/pg"
)

// replica is the row of a live replica in mesh.key_replica.
type replica struct {
	Service   string    `db:"service"`
	ReplicaID string    `db:"replica_id"`
	Takes     []string  `db:"takes"`
	Holds     []string  `db:"holds"`
	Problems  []string  `db:"problems"`
	SeenAt    time.Time `db:"seen_at"`
}

// Rotation is a row of mesh.key_rotation.
type Rotation struct {
	ID          string    `db:"rotation_id" expr:"@.rotation_id::text"`
	Kind        Kind      `db:"kind"`
	RequestedBy string    `db:"requested_by"`
	Reason      string    `db:"reason"`
	RequestedAt time.Time `db:"requested_at"`
	KeyID       string    `db:"key_id"`
}

var (
	services = []string{pg.RoleNodeAPI, pg.RoleLifecycle, pg.RoleRecovery, pg.RoleReadmodel}
	signers  = []string{pg.RoleLifecycle, pg.RoleRecovery, pg.RoleReadmodel}

	readKeys = pg.DefineShared(services, "keyset.read_keys", `
		SELECT `+pg.Columns[Key]("k")+` FROM mesh.signing_key k ORDER BY k.kind, k.made_at, k.key_id`)

	readOpenRotations = pg.DefineShared(services, "keyset.read_open_rotations", `
		SELECT `+pg.Columns[Rotation]("r")+` FROM mesh.key_rotation r WHERE r.key_id = ''`)

	readRotation = pg.Define(pg.RoleRecovery, "keyset.read_rotation", `
		SELECT `+pg.Columns[Rotation]("r")+` FROM mesh.key_rotation r WHERE r.idempotency_key = $1
		UNION ALL
		SELECT `+pg.Columns[Rotation]("r")+`
		FROM mesh.key_rotation_repeat a JOIN mesh.key_rotation r ON r.rotation_id = a.rotation_id
		WHERE a.idempotency_key = $1`)

	insertRotation = pg.Define(pg.RoleRecovery, "keyset.insert_rotation", `
		INSERT INTO mesh.key_rotation AS r (rotation_id, kind, idempotency_key, requested_by, reason, requested_at)
		VALUES ($1, $2, $3, $4, $5, mesh.clock()) RETURNING `+pg.Columns[Rotation]("r"))

	// The caller has the lock of rotations, so that an idempotency key is in only one of the two tables.
	insertRepeat = pg.Define(pg.RoleRecovery, "keyset.insert_repeat", `
		INSERT INTO mesh.key_rotation_repeat (idempotency_key, rotation_id, requested_at) VALUES ($1, $2, mesh.clock())`)

	readReplicas = pg.DefineShared(services, "keyset.read_replicas", `
		SELECT `+pg.Columns[replica]("r")+` FROM mesh.key_replica r WHERE r.seen_at > mesh.clock() - make_interval(secs => $1)
		ORDER BY r.service, r.replica_id`)

	// An existing row is updated directly: ON CONFLICT would lock it first, and write that to the WAL too.
	saveReplica = pg.DefineShared(services, "keyset.save_replica", `
		WITH kept AS (
			UPDATE mesh.key_replica r SET takes = $2, holds = $3, problems = $4, seen_at = mesh.clock()
			WHERE r.service = current_user AND r.replica_id = $1 RETURNING r.replica_id
		)
		INSERT INTO mesh.key_replica (service, replica_id, takes, holds, problems, seen_at)
		SELECT current_user, $1, $2, $3, $4, mesh.clock() WHERE NOT EXISTS (SELECT FROM kept)
		ON CONFLICT (service, replica_id) DO UPDATE
			SET takes = EXCLUDED.takes, holds = EXCLUDED.holds, problems = EXCLUDED.problems,
			seen_at = EXCLUDED.seen_at`)

	deleteReplicas = pg.DefineShared(services, "keyset.delete_replicas", `
		DELETE FROM mesh.key_replica
			WHERE service = current_user AND (replica_id = $1 OR seen_at < mesh.clock() - interval '1 day')`)

	takeKindLock = pg.DefineShared(signers, "keyset.take_kind_lock", `
		SELECT pg_advisory_xact_lock(hashtextextended('mesh.signing_key/' || $1::text, 0))`)

	takeKindLockOfRotation = pg.Define(pg.RoleRecovery, "keyset.take_rotation_lock", `
		SELECT pg_advisory_xact_lock(hashtextextended('mesh.key_rotation', 0))`)

	readClock = pg.DefineShared(services, "keyset.read_clock", `SELECT mesh.clock()`)

	insertKey = pg.DefineShared(signers, "keyset.insert_key", `
		INSERT INTO mesh.signing_key (kind, key_id, public_key, state, file, endorsed_by, endorsement, made_by, made_at,
			state_at, returned)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, mesh.clock(), mesh.clock(), $9) ON CONFLICT DO NOTHING`)

	moveKey = pg.DefineShared(signers, "keyset.move_key", `
		UPDATE mesh.signing_key SET state = $4, state_at = mesh.clock(), needed_by = ''
			WHERE kind = $1 AND key_id = $2 AND state = $3`)

	noteNeed = pg.DefineShared(signers, "keyset.note_need", `
		UPDATE mesh.signing_key SET needed_by = $4 WHERE kind = $1 AND key_id = $2 AND state = $3 AND needed_by <> $4`)

	nameRotation = pg.DefineShared(signers, "keyset.name_rotation", `
		UPDATE mesh.key_rotation SET key_id = $2 WHERE kind = $1 AND key_id = ''`)
)

// ReadKeys returns the whole set.
func ReadKeys(ctx context.Context, q pg.Querier) ([]Key, error) {
	rows, err := pg.All[Key](ctx, q, readKeys)
	if err != nil {
		return nil, fmt.Errorf("read keys: %w", err)
	}
	return rows, nil
}

// readSet returns the whole set and the rotations that are open, in one transaction with the statements of the batch,
// which run first.
func readSet(ctx context.Context, pool *pgxpool.Pool, batch *pg.Batch) ([]Key, []Rotation, error) {
	var keys []Key
	var open []Rotation
	batch.Queue(readKeys).Query(func(rows pgx.Rows) error {
		var err error
		keys, err = pgx.CollectRows(rows, pgx.RowToStructByName[Key])
		return err
	})
	batch.Queue(readOpenRotations).Query(func(rows pgx.Rows) error {
		var err error
		open, err = pgx.CollectRows(rows, pgx.RowToStructByName[Rotation])
		return err
	})
	if err := batch.Send(ctx, pool); err != nil {
		return nil, nil, fmt.Errorf("read keys: %w", err)
	}
	return keys, open, nil
}

func ofKind(kind Kind, rows []Key) []Key {
	var out []Key
	for _, row := range rows {
		if row.Kind == kind {
			out = append(out, row)
		}
	}
	return out
}

// in returns the keys of a kind in a state.
func in(state string, kind Kind, rows []Key) []Key {
	var out []Key
	for _, row := range rows {
		if row.Kind == kind && row.State == state {
			out = append(out, row)
		}
	}
	return out
}

// firstStored describes how a key is stored for the first time.
type firstStored struct {
	state, madeBy string
	returned      bool
}

func insert(ctx context.Context, tx pgx.Tx, kind Kind, key privateKey, as firstStored) (bool, error) {
	endorsement := key.endorsement
	if endorsement == nil {
		endorsement = []byte{}
	}
	tag, err := pg.Exec(ctx, tx, insertKey, string(kind), key.id, []byte(key.public()), as.state, key.file, key.endorsedBy,
		endorsement,
		as.madeBy, as.returned)
	if err != nil {
		return false, fmt.Errorf("insert key %s: %w", key.id, err)
	}
	return tag.RowsAffected() == 1, nil
}
