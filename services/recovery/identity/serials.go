package identity

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/identity/judge"
)

// Serial is one certificate that was issued to a node.
type Serial struct {
	Serial     string `db:"serial"`
	NodeID     string `db:"node_id" expr:"@.node_id::text"`
	InstanceID string `db:"node_instance_id" expr:"@.node_instance_id::text"`
	// KeySHA256 is of the certificate's public key; nil for a certificate that was taken over after a rollback.
	KeySHA256         []byte               `db:"csr_key_sha256"`
	ChainPEM          []byte               `db:"chain_pem"`
	IssuerFingerprint string               `db:"issuer_fingerprint"`
	State             commonv1.SerialState `db:"-"`
	IssuedAt          time.Time            `db:"issued_at"`
	NotBefore         time.Time            `db:"not_before"`
	NotAfter          time.Time            `db:"not_after"`
	Ready             bool                 `db:"ready" expr:"@.ready_at IS NOT NULL"` // a session was ready on it
	Unreadable        bool                 `db:"-"`                                   // this build does not know the state
}

// storedSerial is a certificate as it is stored.
type storedSerial struct {
	Serial
	StateText string `db:"state"`
}

// serialUse has those columns of a certificate that decide about a session, without the chain, which a batch does not
// need.
type serialUse struct {
	Serial     string    `db:"serial"`
	NodeID     string    `db:"node_id" expr:"@.node_id::text"`
	InstanceID string    `db:"node_instance_id" expr:"@.node_instance_id::text"`
	KeySHA256  []byte    `db:"csr_key_sha256"`
	State      string    `db:"state"`
	NotAfter   time.Time `db:"not_after"`
	Ready      bool      `db:"ready" expr:"@.ready_at IS NOT NULL"`
}

// promoted is a certificate that has become current.
type promoted struct {
	Serial   string    `db:"serial"`
	NotAfter time.Time `db:"not_after"`
	Issuer   string    `db:"issuer_fingerprint"`
}

// readSerial runs a statement that returns one certificate; false if there is none.
func readSerial(ctx context.Context, q pg.Querier, s *pg.Statement, args ...any) (Serial, bool, error) {
	row, err := pg.One[storedSerial](ctx, q, s, args...)
	if pg.IsNoRows(err) {
		return Serial{}, false, nil
	}
	if err != nil {
		return Serial{}, false, fmt.Errorf("read serial: %w", err)
	}
	row.State, row.Unreadable = serialState(ctx, row.Serial.Serial, row.StateText)
	return row.Serial, true, nil
}

// serialState returns the state of a certificate. If this build does not know the state, package aside reports it and
// the bool is true.
func serialState(ctx context.Context, serial, text string) (commonv1.SerialState, bool) {
	state, err := names.Parse[commonv1.SerialState](text)
	if err != nil {
		aside.Note(ctx, "serial", serial, err)
	}
	return state, err != nil
}

// Use returns how the certificate counts for a node as it is now: those of earlier enrolments and of other nodes count
// as revoked.
func (s Serial) Use(r *Record) judge.CertificateUse {
	switch {
	case s.Serial == "":
		return judge.CertificateUse{}
	case s.NodeID != r.NodeID || s.InstanceID != r.InstanceID:
		return judge.CertificateUse{State: commonv1.SerialState_SERIAL_STATE_REVOKED}
	default:
		return judge.CertificateUse{State: s.State, Used: s.Ready, Unreadable: s.Unreadable}
	}
}

func loadUses(ctx context.Context, tx pgx.Tx, serials []string) (map[string]Serial, error) {
	rows, err := pg.All[serialUse](ctx, tx, readUses, serials)
	if err != nil {
		return nil, fmt.Errorf("read serials: %w", err)
	}
	out := make(map[string]Serial, len(rows))
	for _, u := range rows {
		s := Serial{
			Serial: u.Serial, NodeID: u.NodeID, InstanceID: u.InstanceID, KeySHA256: u.KeySHA256, NotAfter: u.NotAfter,
			Ready: u.Ready,
		}
		s.State, s.Unreadable = serialState(ctx, u.Serial, u.State)
		out[u.Serial] = s
	}
	return out, nil
}

// SerialByKey returns the certificate that was issued to a node for a key; false if there is none.
func SerialByKey(ctx context.Context, q pg.Querier, nodeID string, keySHA256 []byte) (Serial, bool, error) {
	return readSerial(ctx, q, serialByKey, nodeID, keySHA256)
}

// SerialByName returns the certificate with a serial; false if recovery issued none.
func SerialByName(ctx context.Context, q pg.Querier, serial string) (Serial, bool, error) {
	return readSerial(ctx, q, serialByName, serial)
}

// Offer puts a certificate into the node's next slot. The certificate that was there was issued and never used, and
// becomes superseded. Offer changes the record, which the caller must save.
func Offer(ctx context.Context, tx pgx.Tx, r *Record, s Serial) error {
	if _, err := pg.Exec(ctx, tx, supersedeNext, r.NodeID); err != nil {
		return fmt.Errorf("supersede next serial: %w", err)
	}
	_, err := pg.Exec(ctx, tx, insertSerial, s.Serial, r.NodeID, r.InstanceID, s.KeySHA256, s.ChainPEM,
		s.IssuerFingerprint, s.NotBefore, s.NotAfter)
	if err != nil {
		return fmt.Errorf("insert serial: %w", err)
	}
	r.NextSerial = s.Serial
	return nil
}

// offerAgain puts a superseded certificate that was never used into the node's next slot again. It changes the record,
// which the caller must save.
func offerAgain(ctx context.Context, tx pgx.Tx, r *Record, serial string) error {
	if _, err := pg.Exec(ctx, tx, supersedeNext, r.NodeID); err != nil {
		return fmt.Errorf("supersede next serial: %w", err)
	}
	tag, err := pg.Exec(ctx, tx, reofferSerial, serial, r.NodeID)
	if err != nil {
		return fmt.Errorf("offer serial again: %w", err)
	}
	if tag.RowsAffected() != 1 {
		return fmt.Errorf("offer serial %s again: it changed under the lock of node %s", serial, r.NodeID)
	}
	r.NextSerial = serial
	return nil
}

// RevokeAll revokes every certificate of a node. It changes the record, which the caller must save.
func RevokeAll(ctx context.Context, tx pgx.Tx, r *Record) error {
	if _, err := pg.Exec(ctx, tx, revokeSerials, r.NodeID); err != nil {
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

// promote makes the certificates current that are not, as most of nodes that came back are. The order of its statements
// matters: a unique index allows one current certificate for each node.
func promote(ctx context.Context, tx pgx.Tx, list []promotion) error {
	var old, next []string
	for _, p := range list {
		if p.record.CurrentSerial == p.serial {
			continue
		}
		next = append(next, p.serial)
		if p.record.CurrentSerial != "" {
			old = append(old, p.record.CurrentSerial)
		}
	}
	if len(next) == 0 {
		return nil
	}
	if len(old) > 0 {
		if _, err := pg.Exec(ctx, tx, supersedeSerials, old); err != nil {
			return fmt.Errorf("supersede serials: %w", err)
		}
	}
	rows, err := pg.All[promoted](ctx, tx, promoteSerials, next)
	if err != nil {
		return fmt.Errorf("promote serials: %w", err)
	}
	got := make(map[string]promoted, len(rows))
	for _, row := range rows {
		got[row.Serial] = row
	}
	for _, p := range list {
		if p.record.CurrentSerial == p.serial {
			continue
		}
		f, ok := got[p.serial]
		if !ok {
			return fmt.Errorf("promote serials: one of node %s changed under its lock", p.record.NodeID)
		}
		p.record.CurrentSerial, p.record.CertificateEnds, p.record.IssuerFingerprint = p.serial, f.NotAfter, f.Issuer
		if p.record.NextSerial == p.serial {
			p.record.NextSerial = ""
		}
	}
	return nil
}
