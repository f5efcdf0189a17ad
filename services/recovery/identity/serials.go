package identity

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
)

// Serial is one certificate that was issued to a node.
type Serial struct {
	Serial            string
	NodeID            string
	InstanceID        string
	KeySHA256         []byte // of its public key; nil for one taken over after a rollback
	ChainPEM          []byte
	IssuerFingerprint string
	State             commonv1.SerialState
	IssuedAt          time.Time
	NotBefore         time.Time
	NotAfter          time.Time
	Ready             bool // a session was ready on it
}

const serialColumns = `serial, node_id::text, node_instance_id::text, csr_key_sha256, chain_pem, issuer_fingerprint, state, issued_at, not_before,
	not_after, ready_at IS NOT NULL`

func scanSerial(row pgx.Row) (Serial, error) {
	var s Serial
	var state string
	err := row.Scan(&s.Serial, &s.NodeID, &s.InstanceID, &s.KeySHA256, &s.ChainPEM, &s.IssuerFingerprint, &state, &s.IssuedAt, &s.NotBefore,
		&s.NotAfter, &s.Ready)
	if err != nil {
		return Serial{}, err //nolint:wrapcheck // the caller says what it read
	}
	if s.State, err = names.Parse[commonv1.SerialState](state); err != nil {
		return Serial{}, fmt.Errorf("read serial: %w", err)
	}
	return s, nil
}

// Use is how the certificate counts for a node as it is now: those of earlier enrolments and of other nodes are revoked.
func (s Serial) Use(r *Record) CertificateUse {
	switch {
	case s.Serial == "":
		return CertificateUse{}
	case s.NodeID != r.NodeID || s.InstanceID != r.InstanceID:
		return CertificateUse{State: commonv1.SerialState_SERIAL_STATE_REVOKED}
	default:
		return CertificateUse{State: s.State, Used: s.Ready}
	}
}

// useOnly are the columns that decide about a session: a batch must not drag chains along.
func loadUses(ctx context.Context, tx pgx.Tx, serials []string) (map[string]Serial, error) {
	rows, err := tx.Query(ctx, `SELECT serial, node_id::text, node_instance_id::text, state, ready_at IS NOT NULL, not_after,
		csr_key_sha256 FROM recovery.serial WHERE serial = ANY($1)`, serials)
	if err != nil {
		return nil, fmt.Errorf("read serials: %w", err)
	}
	defer rows.Close()
	out := make(map[string]Serial, len(serials))
	for rows.Next() {
		var s Serial
		var state string
		if err := rows.Scan(&s.Serial, &s.NodeID, &s.InstanceID, &state, &s.Ready, &s.NotAfter, &s.KeySHA256); err != nil {
			return nil, fmt.Errorf("read serial: %w", err)
		}
		if s.State, err = names.Parse[commonv1.SerialState](state); err != nil {
			return nil, fmt.Errorf("read serial: %w", err)
		}
		out[s.Serial] = s
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("read serials: %w", err)
	}
	return out, nil
}

// SerialByKey answers the certificate that a node was issued for a key; false if there is none.
func SerialByKey(ctx context.Context, q pg.Querier, nodeID string, keySHA256 []byte) (Serial, bool, error) {
	s, err := scanSerial(q.QueryRow(ctx, `SELECT `+serialColumns+` FROM recovery.serial WHERE node_id = $1 AND csr_key_sha256 = $2`, nodeID, keySHA256))
	if pg.IsNoRows(err) {
		return Serial{}, false, nil
	}
	if err != nil {
		return Serial{}, false, fmt.Errorf("read serial by key: %w", err)
	}
	return s, true, nil
}

// SerialByName answers one certificate; false if it is not ours.
func SerialByName(ctx context.Context, q pg.Querier, serial string) (Serial, bool, error) {
	s, err := scanSerial(q.QueryRow(ctx, `SELECT `+serialColumns+` FROM recovery.serial WHERE serial = $1`, serial))
	if pg.IsNoRows(err) {
		return Serial{}, false, nil
	}
	if err != nil {
		return Serial{}, false, fmt.Errorf("read serial: %w", err)
	}
	return s, true, nil
}

// Offer puts a certificate into the node's next slot. What stood there was issued and never used: it is superseded. The record is changed with
// it and is the caller's to save.
func Offer(ctx context.Context, tx pgx.Tx, r *Record, s Serial) error {
	if _, err := tx.Exec(ctx, `UPDATE recovery.serial SET state = 'superseded', state_at = mesh.clock() WHERE node_id = $1 AND state = 'next'`, r.NodeID); err != nil {
		return fmt.Errorf("supersede next serial: %w", err)
	}
	_, err := tx.Exec(ctx, `INSERT INTO recovery.serial (serial, node_id, node_instance_id, csr_key_sha256, chain_pem, issuer_fingerprint, state,
			not_before, not_after)
		VALUES ($1, $2, $3, $4, $5, $6, 'next', $7, $8)`,
		s.Serial, r.NodeID, r.InstanceID, s.KeySHA256, s.ChainPEM, s.IssuerFingerprint, s.NotBefore, s.NotAfter)
	if err != nil {
		return fmt.Errorf("insert serial: %w", err)
	}
	r.NextSerial = s.Serial
	return nil
}

// RevokeAll ends every certificate of a node. The record is changed with it and is the caller's to save.
func RevokeAll(ctx context.Context, tx pgx.Tx, r *Record) error {
	_, err := tx.Exec(ctx, `UPDATE recovery.serial SET state = 'revoked', state_at = mesh.clock() WHERE node_id = $1 AND state <> 'revoked'`, r.NodeID)
	if err != nil {
		return fmt.Errorf("revoke serials: %w", err)
	}
	r.CurrentSerial, r.NextSerial, r.CertificateEnds, r.IssuerFingerprint = "", "", time.Time{}, ""
	return nil
}

// promotion is a certificate that a session was ready on.
type promotion struct {
	record *Record
	serial string
}

// promote makes them current. The order matters: one current per node is an index.
func promote(ctx context.Context, tx pgx.Tx, list []promotion) error {
	if len(list) == 0 {
		return nil
	}
	var old, fresh []string
	for _, p := range list {
		fresh = append(fresh, p.serial)
		if p.record.CurrentSerial != "" && p.record.CurrentSerial != p.serial {
			old = append(old, p.record.CurrentSerial)
		}
	}
	if len(old) > 0 {
		_, err := tx.Exec(ctx, `UPDATE recovery.serial SET state = 'superseded', state_at = mesh.clock() WHERE serial = ANY($1) AND state = 'current'`, old)
		if err != nil {
			return fmt.Errorf("supersede serials: %w", err)
		}
	}
	rows, err := tx.Query(ctx, `UPDATE recovery.serial SET state = 'current', state_at = CASE WHEN state = 'next' THEN mesh.clock() ELSE state_at END,
			ready_at = COALESCE(ready_at, mesh.clock())
		WHERE serial = ANY($1) AND state IN ('next', 'current') RETURNING serial, not_after, issuer_fingerprint`, fresh)
	if err != nil {
		return fmt.Errorf("promote serials: %w", err)
	}
	defer rows.Close()
	type facts struct {
		ends   time.Time
		issuer string
	}
	got := map[string]facts{}
	for rows.Next() {
		var serial string
		var f facts
		if err := rows.Scan(&serial, &f.ends, &f.issuer); err != nil {
			return fmt.Errorf("promote serial: %w", err)
		}
		got[serial] = f
	}
	if err := rows.Err(); err != nil {
		return fmt.Errorf("promote serials: %w", err)
	}
	for _, p := range list {
		f, ok := got[p.serial]
		if !ok {
			return fmt.Errorf("promote serials: one of node %s changed under its lock", p.record.NodeID)
		}
		p.record.CurrentSerial, p.record.CertificateEnds, p.record.IssuerFingerprint = p.serial, f.ends, f.issuer
		if p.record.NextSerial == p.serial {
			p.record.NextSerial = ""
		}
	}
	return nil
}
