package enrol

import (
	"time"

	"github.com/gpuaas/mesh/internal/pg"
)

// token is a row.
type token struct {
	ID         string    `db:"token_id" expr:"@.token_id::text"`
	Kind       Kind      `db:"kind"`
	NodeID     string    `db:"node_id" expr:"@.node_id::text"`
	Hash       []byte    `db:"secret_sha256"`
	State      string    `db:"state"`
	ExpiresAt  time.Time `db:"expires_at"`
	UsedKey    []byte    `db:"used_key_sha256"`
	UsedSerial string    `db:"used_serial"`
}

// issuedToken is the token of an earlier request.
type issuedToken struct {
	ID     string `db:"token_id" expr:"t.token_id::text"`
	Kind   Kind   `db:"kind" expr:"t.kind"`
	NodeID string `db:"node_id" expr:"t.node_id::text"`
	State  string `db:"state" expr:"t.state"`
	Name   string `db:"name" expr:"i.name"`
}

// enrolmentLease is an enrolment that is under way.
type enrolmentLease struct {
	ID    string    `db:"enrollment_id" expr:"@.enrollment_id::text"`
	Until time.Time `db:"lease_until"`
}

var readClock = pg.Define(pg.RoleRecovery, "enrol.read_clock", `SELECT mesh.clock()`)

// Tokens.
var (
	readToken = pg.Define(pg.RoleRecovery, "enrol.read_token", `
		SELECT `+pg.Columns[token]("t")+` FROM recovery.token t WHERE t.token_id = $1 AND t.kind = $2`)

	lockToken = pg.Define(pg.RoleRecovery, "enrol.lock_token", `
		SELECT `+pg.Columns[token]("t")+` FROM recovery.token t WHERE t.token_id = $1 FOR UPDATE`)

	readIssued = pg.Define(pg.RoleRecovery, "enrol.read_token_of_request", `
		SELECT `+pg.Columns[issuedToken]("")+` FROM recovery.token t JOIN recovery.identity i USING (node_id)
		WHERE t.issued_by = $1 AND t.idempotency_key = $2`)

	revokeEarlier = pg.Define(pg.RoleRecovery, "enrol.revoke_earlier_tokens", `
		UPDATE recovery.token SET state = 'revoked', state_at = mesh.clock()
			WHERE node_id = $1 AND state = 'issued' AND token_id <> $2 AND kind <> 'launch'`)

	revokeTokens = pg.Define(pg.RoleRecovery, "enrol.revoke_tokens_of_node", `
		UPDATE recovery.token SET state = 'revoked', state_at = mesh.clock()
			WHERE node_id = $1 AND state IN ('issued', 'used')`)

	renewToken = pg.Define(pg.RoleRecovery, "enrol.renew_token", `
		UPDATE recovery.token SET secret_sha256 = $2, expires_at = mesh.clock() + make_interval(secs => $3)
		WHERE token_id = $1 AND state = 'issued' RETURNING expires_at`)

	insertOperator = pg.Define(pg.RoleRecovery, "enrol.insert_operator_token", `
		INSERT INTO recovery.token (token_id, kind, node_id, secret_sha256, state, issued_by, idempotency_key, expires_at)
		VALUES ($1, $7, $2, $3, 'issued', $4, $5, mesh.clock() + make_interval(secs => $6)) RETURNING expires_at`)

	// followLaunch has the launch secret of an instance that was enrolled by a bundle count as used by it.
	followLaunch = pg.Define(pg.RoleRecovery, "enrol.follow_launch_secret", `
		UPDATE recovery.token SET state = 'used', state_at = mesh.clock(), used_key_sha256 = $2, used_serial = $3
		WHERE token_id = $1 AND kind = 'launch' AND state IN ('issued', 'used', 'expired')`)

	useToken = pg.Define(pg.RoleRecovery, "enrol.use_token", `
		UPDATE recovery.token SET state = 'used', state_at = mesh.clock(), used_key_sha256 = $2, used_serial = $3
		WHERE token_id = $1 AND secret_sha256 = $4 AND state IN ('issued', 'used')`)
)

// Claims.
var (
	readClaim = pg.Define(pg.RoleRecovery, "enrol.read_claim", `
		SELECT `+pg.Columns[enrolmentLease]("e")+` FROM recovery.enrollment e WHERE e.node_id = $1 AND e.state = 'claimed'`)

	insertClaim = pg.Define(pg.RoleRecovery, "enrol.insert_claim", `
		INSERT INTO recovery.enrollment (enrollment_id, token_id, node_id, csr_key_sha256, state, lease_until,
			recovery_token_id)
		VALUES ($1, NULLIF($2, '')::uuid, $3, $4, 'claimed', mesh.clock() + make_interval(secs => $5),
			NULLIF($6, '')::uuid)`)

	closeClaim = pg.Define(pg.RoleRecovery, "enrol.close_claim", `
		UPDATE recovery.enrollment SET state = $2, serial = $3, failure = left($4, 512), ended_at = mesh.clock()
		WHERE enrollment_id = $1 AND state = 'claimed'`)

	recordOrphan = pg.Define(pg.RoleRecovery, "enrol.record_orphan", `
		UPDATE recovery.enrollment SET serial = $2, failure = left($3, 512),
			state = CASE WHEN state = 'claimed' THEN 'failed' ELSE state END, ended_at = COALESCE(ended_at, mesh.clock())
		WHERE enrollment_id = $1 AND state <> 'done'`)
)

// What Sweep does.
var (
	expireTokens = pg.Define(pg.RoleRecovery, "enrol.expire_tokens", `
		UPDATE recovery.token SET state = 'expired', state_at = mesh.clock() WHERE token_id IN (
			SELECT token_id FROM recovery.token WHERE state = 'issued' AND expires_at <= mesh.clock()
			ORDER BY expires_at LIMIT 1000 FOR UPDATE SKIP LOCKED)`)

	abandonClaims = pg.Define(pg.RoleRecovery, "enrol.abandon_claims", `
		UPDATE recovery.enrollment SET state = 'abandoned', ended_at = mesh.clock(), failure = 'its lease ran out'
		WHERE state = 'claimed' AND lease_until <= mesh.clock() - interval '1 minute'`)

	forgetSessions = pg.Define(pg.RoleRecovery, "enrol.forget_sessions", `
		DELETE FROM recovery.session_open WHERE session_id IN (
			SELECT o.session_id FROM recovery.session_open o JOIN recovery.identity i USING (node_id)
			WHERE o.opened_at <= mesh.clock() - interval '1 day' AND i.confirmed_session_id IS DISTINCT FROM o.session_id
			ORDER BY o.opened_at LIMIT 5000)`)
)
