package identity

import (
	"time"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/identity/joinkeys"
)

// epochHolder is a workspace and the instance that has its highest epoch.
type epochHolder struct {
	WorkspaceID string `db:"workspace_id" expr:"@.workspace_id::text"`
	InstanceID  string `db:"instance_id" expr:"@.instance_id::text"`
}

// refused counts what a retired instance was refused.
type refused struct {
	Refusals  int64     `db:"refusals"`
	RefusedAt time.Time `db:"refused_at"`
}

// Nodes.
var (
	readMoment = pg.Define(pg.RoleRecovery, "identity.read_moment",
		`SELECT mesh.clock() AS now, era, mesh.rolled_back() AS rolled_back FROM mesh.era`)

	lockNodes = pg.Define(pg.RoleRecovery, "identity.lock_nodes", `
		SELECT `+pg.Columns[storedRecord]("i")+` FROM recovery.identity i WHERE i.node_id = ANY($1::uuid[]) ORDER BY i.node_id
			FOR NO KEY UPDATE`)

	lockByName = pg.Define(pg.RoleRecovery, "identity.lock_node_by_name", `
		SELECT `+pg.Columns[storedRecord]("i")+` FROM recovery.identity i WHERE i.name = $1 AND i.state <> 'retired'
			FOR NO KEY UPDATE`)

	insertNode = pg.Define(pg.RoleRecovery, "identity.insert_node", `
		INSERT INTO recovery.identity (node_id, name, state, state_by, state_reason, state_at, created_at, version,
			workspace_id, tenant_id, epoch, instance_id, profile)
		VALUES ($1, $2, 'pending', $3, $4, $5, $5, 0, NULLIF($6, '')::uuid, NULLIF($7, '')::uuid, $8,
			NULLIF($9, '')::uuid, $10)`)

	updateNodes = pg.Define(pg.RoleRecovery, "identity.update_nodes", `
		UPDATE recovery.identity i SET
			node_instance_id = n.node_instance_id, state = n.state, state_reason = n.state_reason, state_by = n.state_by,
				state_at = n.state_at,
			alarm = n.alarm, fence_epoch = n.fence_epoch, fence_acked = n.fence_acked, told = n.told, told_acked = n.told_acked,
			told_at = CASE WHEN n.told > i.told THEN mesh.clock() ELSE i.told_at END,
			issued = n.issued, confirmed = n.confirmed, confirmed_session_id = n.confirmed_session_id,
				replaced_nonce = n.replaced_nonce,
			current_serial = n.current_serial, next_serial = n.next_serial, certificate_not_after = n.certificate_not_after,
			issuer_fingerprint = n.issuer_fingerprint, mints = n.mints, refused_registers = n.refused_registers,
				last_refusal = n.last_refusal, authority_seq = n.authority_seq, join_keys = n.join_keys, profile = n.profile,
				version = n.version
		FROM jsonb_to_recordset($1::jsonb) AS n (node_id uuid, node_instance_id uuid, state text, state_reason text,
			state_by text,
			state_at timestamptz, alarm text, fence_epoch bigint, fence_acked bigint, told bigint, told_acked bigint,
				issued bigint,
			confirmed bigint, confirmed_session_id uuid, replaced_nonce text, current_serial text, next_serial text,
			certificate_not_after timestamptz, issuer_fingerprint text, mints integer, refused_registers integer,
				last_refusal text, authority_seq bigint, join_keys text[], profile text, version bigint)
		WHERE i.node_id = n.node_id AND i.version = n.version - 1`)

	raiseGenerations = pg.Define(pg.RoleRecovery, "identity.raise_generations", `
		UPDATE recovery.identity i
			SET issued = n.issued, join_keys = array_remove(array_remove(i.join_keys, $3),
			'`+joinkeys.None+`') || $3 FROM unnest($1::uuid[], $2::bigint[]) AS n (node_id, issued)
		WHERE i.node_id = n.node_id AND i.issued < n.issued`)

	takeAuthorityLock = pg.Define(pg.RoleRecovery, "identity.take_authority_lock", `SELECT pg_advisory_xact_lock($1)`)

	drawNumbers = pg.Define(pg.RoleRecovery, "identity.draw_authority_numbers", `
		UPDATE recovery.authority_head SET seq = mesh.next(seq) + $1 RETURNING seq - $1`)

	takeUnacknowledged = pg.Define(pg.RoleRecovery, "identity.take_unacknowledged_nodes", `
		UPDATE recovery.identity i SET told_at = mesh.clock() + make_interval(secs => $2)
		WHERE i.node_id IN (
			SELECT node_id FROM recovery.identity WHERE told_acked < told AND told_at <= mesh.clock()
			ORDER BY told_at LIMIT $1 FOR NO KEY UPDATE SKIP LOCKED)
		RETURNING `+pg.Columns[storedRecord]("i"))
)

// Certificates and tokens.
var (
	readUses = pg.Define(pg.RoleRecovery, "identity.read_uses_of_serials", `
		SELECT `+pg.Columns[serialUse]("s")+` FROM recovery.serial s WHERE s.serial = ANY($1)`)

	serialByKey = pg.Define(pg.RoleRecovery, "identity.read_serial_by_key", `
		SELECT `+pg.Columns[storedSerial]("s")+` FROM recovery.serial s WHERE s.node_id = $1 AND s.csr_key_sha256 = $2`)

	serialByName = pg.Define(pg.RoleRecovery, "identity.read_serial", `
		SELECT `+pg.Columns[storedSerial]("s")+` FROM recovery.serial s WHERE s.serial = $1`)

	supersedeNext = pg.Define(pg.RoleRecovery, "identity.supersede_next_serial", `
		UPDATE recovery.serial SET state = 'superseded', state_at = mesh.clock() WHERE node_id = $1 AND state = 'next'`)

	supersedeSerials = pg.Define(pg.RoleRecovery, "identity.supersede_serials", `
		UPDATE recovery.serial SET state = 'superseded', state_at = mesh.clock()
			WHERE serial = ANY($1) AND state = 'current'`)

	promoteSerials = pg.Define(pg.RoleRecovery, "identity.promote_serials", `
		UPDATE recovery.serial s SET state = 'current', state_at = CASE WHEN state = 'next' THEN mesh.clock() ELSE state_at
			END, ready_at = COALESCE(ready_at, mesh.clock())
		WHERE serial = ANY($1) AND state IN ('next', 'current') RETURNING `+pg.Columns[promoted]("s"))

	insertSerial = pg.Define(pg.RoleRecovery, "identity.insert_serial", `
		INSERT INTO recovery.serial (serial, node_id, node_instance_id, csr_key_sha256, chain_pem, issuer_fingerprint, state,
			not_before, not_after)
		VALUES ($1, $2, $3, $4, $5, $6, 'next', $7, $8)`)

	reofferSerial = pg.Define(pg.RoleRecovery, "identity.offer_serial_again", `
		UPDATE recovery.serial SET state = 'next', state_at = mesh.clock()
			WHERE serial = $1 AND node_id = $2 AND state = 'superseded' AND ready_at IS NULL`)

	revokeSerials = pg.Define(pg.RoleRecovery, "identity.revoke_serials", `
		UPDATE recovery.serial SET state = 'revoked', state_at = mesh.clock() WHERE node_id = $1 AND state <> 'revoked'`)

	revokeTokens = pg.Define(pg.RoleRecovery, "identity.revoke_tokens", `
		UPDATE recovery.token SET state = 'revoked', state_at = mesh.clock()
			WHERE node_id = $1 AND state IN ('issued', 'used')`)
)

// Sessions and instances.
var (
	readHolders = pg.Define(pg.RoleRecovery, "identity.read_epochs_of_workspaces", `
		SELECT `+pg.Columns[epochHolder]("w")+` FROM recovery.workspace_epoch w WHERE w.workspace_id = ANY($1::uuid[])`)

	countRefusal = pg.Define(pg.RoleRecovery, "identity.count_refusal", `
		UPDATE recovery.instance i SET refused_at = mesh.clock(), refusals = refusals + 1
		WHERE instance_id = $1 AND (refused_at IS NULL OR refused_at <= mesh.clock() - make_interval(secs => $2))
		RETURNING `+pg.Columns[refused]("i"))
)
