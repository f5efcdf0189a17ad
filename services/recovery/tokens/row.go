package tokens

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki/ca"
)

// What ended a token.
const (
	EndedReuse    = "reuse" // one of the node was used with a second key
	EndedOperator = "operator"
	EndedEnrolled = "enrolled" // the node was enrolled by an operator's token, or the instance by its launch secret
)

// The states of a token.
const (
	StateIssued  = "issued"
	StateUsed    = "used"
	StateExpired = "expired" // it was too old for so long that no extension makes it good again
)

// Row is one recovery token.
type Row struct {
	ID           string     `db:"token_id" expr:"@.token_id::text"`
	NodeID       string     `db:"node_id" expr:"@.node_id::text"`
	InstanceID   string     `db:"node_instance_id" expr:"@.node_instance_id::text"`
	Family       string     `db:"family" expr:"@.family::text"`
	Profile      string     `db:"profile"`
	KeySHA256    []byte     `db:"key_sha256"`
	KeyID        string     `db:"key_id"`
	Era          int64      `db:"era"`
	State        string     `db:"state"`
	StateAt      time.Time  `db:"state_at"`
	EndedBy      string     `db:"ended_by"`
	IssuedAt     time.Time  `db:"issued_at"`
	Serial       string     `db:"serial"`
	CountedSince *time.Time `db:"counted_since"`
	UsedKey      []byte     `db:"used_key_sha256"`
	UsedSerial   string     `db:"used_serial"`
}

// Since returns from when the token ages.
func (r *Row) Since() time.Time {
	if r.CountedSince != nil {
		return *r.CountedSince
	}
	return r.IssuedAt
}

// Claims returns the contents of the token's text.
func (r *Row) Claims() ca.RecoveryClaims {
	return ca.RecoveryClaims{
		TokenID: r.ID, NodeID: r.NodeID, NodeInstanceID: r.InstanceID, Profile: r.Profile, KeySHA256: r.KeySHA256,
		IssuedAt: r.IssuedAt, Era: r.Era,
	}
}

// Is reports whether a verified text is of the row as it is now.
func (r *Row) Is(c ca.RecoveryClaims) bool {
	return r.ID == c.TokenID && r.NodeID == c.NodeID && r.InstanceID == c.NodeInstanceID && r.Profile == c.Profile &&
		slices.Equal(r.KeySHA256, c.KeySHA256) && r.Era == c.Era && r.IssuedAt.Unix() == c.IssuedAt.Unix()
}

var (
	lockToken = pg.Define(pg.RoleRecovery, "tokens.lock", `
		SELECT `+pg.Columns[Row]("t")+` FROM recovery.recovery_token t WHERE t.token_id = $1 FOR UPDATE`)

	readKeyOf = pg.Define(pg.RoleRecovery, "tokens.read_key", `
		SELECT t.key_id FROM recovery.recovery_token t WHERE t.token_id = $1`)

	// A certificate has one token. As long as no session was ready on it, the node may ask with another recovery key, for
	// which the token is made anew. A token that is offered once more is signed with the key of its first text, as long as
	// that may sign: the node may have that text.
	offerToken = pg.Define(pg.RoleRecovery, "tokens.offer", `
		INSERT INTO recovery.recovery_token AS t (token_id, node_id, node_instance_id, family, profile, key_sha256, key_id,
			era, state, serial, counted_since)
		SELECT $1, $2, $3, COALESCE((SELECT o.family FROM recovery.recovery_token o
				WHERE o.node_id = $2 AND o.state IN ('issued', 'used') ORDER BY o.token_id DESC LIMIT 1), $3),
			$4, $5, $6, $7, 'issued', $8, CASE WHEN $9 THEN mesh.clock() END
		ON CONFLICT (serial) DO UPDATE SET key_sha256 = EXCLUDED.key_sha256,
			key_id = CASE WHEN t.key_sha256 = EXCLUDED.key_sha256 AND t.key_id = ANY ($10::text[]) THEN t.key_id
				ELSE EXCLUDED.key_id END,
			profile = EXCLUDED.profile, era = EXCLUDED.era,
			issued_at = CASE WHEN t.key_sha256 = EXCLUDED.key_sha256 THEN t.issued_at ELSE EXCLUDED.issued_at END
			WHERE t.state = 'issued' AND (t.counted_since IS NULL OR t.key_sha256 = EXCLUDED.key_sha256)
		RETURNING `+pg.Columns[Row]("t"))

	useTokens = pg.Define(pg.RoleRecovery, "tokens.use", `
		UPDATE recovery.recovery_token SET state = 'used', state_at = mesh.clock(), used_key_sha256 = $2, used_serial = $3
		WHERE node_id = $1 AND state = 'issued' RETURNING token_id::text`)

	endTokens = pg.Define(pg.RoleRecovery, "tokens.end_of_node", `
		UPDATE recovery.recovery_token t SET state = 'revoked', ended_by = $2, state_at = mesh.clock()
		WHERE t.node_id = $1 AND t.state IN ('issued', 'used') RETURNING `+pg.Columns[Row]("t"))

	endToken = pg.Define(pg.RoleRecovery, "tokens.end", `
		UPDATE recovery.recovery_token t SET state = 'revoked', ended_by = $2, state_at = mesh.clock()
		WHERE t.token_id = $1 AND t.state IN ('issued', 'used') RETURNING `+pg.Columns[Row]("t"))
)

// Lock reads a token for a change; false if there is none. The caller holds the lock on the node's row.
func Lock(ctx context.Context, tx pgx.Tx, tokenID string) (Row, bool, error) {
	row, err := pg.One[Row](ctx, tx, lockToken, tokenID)
	if pg.IsNoRows(err) {
		return Row{}, false, nil
	}
	if err != nil {
		return Row{}, false, fmt.Errorf("lock recovery token: %w", err)
	}
	return row, true, nil
}

// SignedBy reports whether a token that was issued is recorded as signed by a key of that name.
func SignedBy(ctx context.Context, q pg.Querier, tokenID, keyID string) (bool, error) {
	of, err := pg.Value[string](ctx, q, readKeyOf, tokenID)
	if pg.IsNoRows(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read key of recovery token: %w", err)
	}
	return of == keyID, nil
}

// Offered is what a token is offered for.
type Offered struct {
	NodeID, InstanceID, Profile, KeyID, Serial string
	KeySHA256                                  []byte
	Era                                        int64
	Ready                                      bool // a session was ready on the certificate already

	Signs []string // ids of keys that may sign beside KeyID, if the token was offered with one of them before
}

// Offer records the token that comes with a certificate, and returns it; false if the certificate's token has ended, or
// counts for another recovery key. The same certificate with the same key gets the same token. The caller holds the
// lock on the node's row.
func Offer(ctx context.Context, tx pgx.Tx, o Offered) (Row, bool, error) {
	row, err := pg.One[Row](ctx, tx, offerToken, ids.New(), o.NodeID, o.InstanceID, o.Profile, o.KeySHA256, o.KeyID, o.Era,
		o.Serial, o.Ready, o.Signs)
	if pg.IsNoRows(err) {
		return Row{}, false, nil
	}
	if err != nil {
		return Row{}, false, fmt.Errorf("offer recovery token: %w", err)
	}
	return row, true, nil
}

// Use records that a token was used for a certificate, by the key of its request. All tokens that the node may have are
// used with it: they are one right. It reports whether the token could still be used.
func Use(ctx context.Context, tx pgx.Tx, nodeID, tokenID string, key []byte, serial string) (bool, error) {
	used, err := pg.Values[string](ctx, tx, useTokens, nodeID, key, serial)
	if err != nil {
		return false, fmt.Errorf("use recovery token: %w", err)
	}
	return slices.Contains(used, tokenID), nil
}

// EndAll ends every token of a node that is not ended, for the given cause, and returns them.
func EndAll(ctx context.Context, tx pgx.Tx, nodeID, cause string) ([]Row, error) {
	rows, err := pg.All[Row](ctx, tx, endTokens, nodeID, cause)
	if err != nil {
		return nil, fmt.Errorf("end recovery tokens: %w", err)
	}
	return rows, nil
}
