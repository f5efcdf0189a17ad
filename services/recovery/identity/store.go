package identity

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
)

// authorityLock makes the order of authority numbers the order of commits.
const authorityLock = 0x67707561_0020

const columns = `node_id::text, name, COALESCE(node_instance_id::text, ''), state, state_reason, state_by, state_at, alarm, fence_epoch, fence_acked,
	told, told_acked, issued, confirmed, COALESCE(confirmed_session_id::text, ''), replaced_nonce, current_serial, next_serial,
	COALESCE(certificate_not_after, '0001-01-01Z'), issuer_fingerprint, COALESCE(workspace_id::text, ''), COALESCE(tenant_id::text, ''), epoch,
	COALESCE(instance_id::text, ''), mints, refused_registers, last_refusal, authority_seq, version, created_at`

func scan(row pgx.Row) (*Record, error) {
	var r Record
	var state, refusal string
	err := row.Scan(&r.NodeID, &r.Name, &r.InstanceID, &state, &r.StateReason, &r.StateBy, &r.StateAt, &r.Alarm, &r.FenceEpoch, &r.FenceAcked,
		&r.Told, &r.ToldAcked, &r.Issued, &r.Confirmed, &r.ConfirmedSession, &r.ReplacedNonce, &r.CurrentSerial, &r.NextSerial,
		&r.CertificateEnds, &r.IssuerFingerprint, &r.WorkspaceID, &r.TenantID, &r.Epoch, &r.BoxID, &r.Mints, &r.RefusedRegisters, &refusal,
		&r.AuthoritySeq, &r.Version, &r.CreatedAt)
	if err != nil {
		return nil, err //nolint:wrapcheck // the caller says what it read
	}
	if r.State, err = names.Parse[commonv1.NodeIdentityState](state); err != nil {
		return nil, fmt.Errorf("read node %s: %w", r.NodeID, err)
	}
	if refusal != "" {
		if r.LastRefusal, err = names.Parse[commonv1.Reason](refusal); err != nil {
			return nil, fmt.Errorf("read node %s: %w", r.NodeID, err)
		}
	}
	if r.CertificateEnds.Year() <= 1 {
		r.CertificateEnds = time.Time{}
	}
	return &r, nil
}

func collect(rows pgx.Rows, err error) ([]*Record, error) {
	if err != nil {
		return nil, fmt.Errorf("read nodes: %w", err)
	}
	defer rows.Close()
	var out []*Record
	for rows.Next() {
		r, err := scan(rows)
		if err != nil {
			return nil, err
		}
		out = append(out, r)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("read nodes: %w", err)
	}
	return out, nil
}

// Moment is the database's time and era inside a transaction, and whether rollback mode is active.
type Moment struct {
	Now        time.Time
	Era        int64
	RolledBack bool
}

// ReadMoment reads all three.
func ReadMoment(ctx context.Context, q pg.Querier) (Moment, error) {
	var m Moment
	row := q.QueryRow(ctx, `SELECT mesh.clock(), era, mesh.rolled_back() FROM mesh.era`)
	if err := row.Scan(&m.Now, &m.Era, &m.RolledBack); err != nil {
		return Moment{}, fmt.Errorf("read clock, era and rollback mode: %w", err)
	}
	return m, nil
}

// Lock reads nodes for a change, in the order of their ids so that two batches never wait for each other in a circle. Unknown ids are missing
// from the answer.
func Lock(ctx context.Context, tx pgx.Tx, nodeIDs ...string) (map[string]*Record, error) {
	list, err := collect(tx.Query(ctx, `SELECT `+columns+` FROM recovery.identity WHERE node_id = ANY($1::uuid[]) ORDER BY node_id FOR NO KEY UPDATE`, nodeIDs))
	if err != nil {
		return nil, fmt.Errorf("lock nodes: %w", err)
	}
	out := make(map[string]*Record, len(list))
	for _, r := range list {
		out[r.NodeID] = r
	}
	return out, nil
}

// LockOne is Lock of one node that must exist: identity_unknown otherwise.
func LockOne(ctx context.Context, tx pgx.Tx, nodeID string) (*Record, error) {
	found, err := Lock(ctx, tx, nodeID)
	if err != nil {
		return nil, err
	}
	if r := found[nodeID]; r != nil {
		return r, nil
	}
	return nil, fault.New(commonv1.Reason_REASON_IDENTITY_UNKNOWN, "")
}

// Get reads one node without a lock; identity_unknown if there is none.
func Get(ctx context.Context, q pg.Querier, nodeID string) (*Record, error) {
	r, err := scan(q.QueryRow(ctx, `SELECT `+columns+` FROM recovery.identity WHERE node_id = $1`, nodeID))
	if pg.IsNoRows(err) {
		return nil, fault.New(commonv1.Reason_REASON_IDENTITY_UNKNOWN, "")
	}
	if err != nil {
		return nil, fmt.Errorf("read node: %w", err)
	}
	return r, nil
}

// GetByName reads the live node of a name; nil if there is none. The row is locked.
func GetByName(ctx context.Context, tx pgx.Tx, name string) (*Record, error) {
	r, err := scan(tx.QueryRow(ctx, `SELECT `+columns+` FROM recovery.identity WHERE name = $1 AND state <> 'retired' FOR NO KEY UPDATE`, name))
	if pg.IsNoRows(err) {
		return nil, nil //nolint:nilnil // absence is an answer here
	}
	if err != nil {
		return nil, fmt.Errorf("read node by name: %w", err)
	}
	return r, nil
}

// Insert makes a new node's row, pending, and its first event. The position is the event's id.
func Insert(ctx context.Context, tx pgx.Tx, r *Record) (string, error) {
	m, err := ReadMoment(ctx, tx)
	if err != nil {
		return "", err
	}
	r.State, r.StateAt, r.CreatedAt, r.Version = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_PENDING, m.Now, m.Now, 0
	_, err = tx.Exec(ctx, `INSERT INTO recovery.identity (node_id, name, state, state_by, state_reason, state_at, created_at, version,
			workspace_id, tenant_id, epoch, instance_id)
		VALUES ($1, $2, 'pending', $3, $4, $5, $5, 0, NULLIF($6, '')::uuid, NULLIF($7, '')::uuid, $8, NULLIF($9, '')::uuid)`,
		r.NodeID, r.Name, r.StateBy, r.StateReason, m.Now, r.WorkspaceID, r.TenantID, r.Epoch, r.BoxID)
	if err != nil {
		return "", fmt.Errorf("insert node: %w", err)
	}
	return Save(ctx, tx, r)
}

// row is a record as the update reads it.
type row struct {
	NodeID            string     `json:"node_id"`
	InstanceID        *string    `json:"node_instance_id"`
	State             string     `json:"state"`
	StateReason       string     `json:"state_reason"`
	StateBy           string     `json:"state_by"`
	StateAt           time.Time  `json:"state_at"`
	Alarm             string     `json:"alarm"`
	FenceEpoch        int64      `json:"fence_epoch"`
	FenceAcked        int64      `json:"fence_acked"`
	Told              int64      `json:"told"`
	ToldAcked         int64      `json:"told_acked"`
	Issued            int64      `json:"issued"`
	Confirmed         int64      `json:"confirmed"`
	ConfirmedSession  *string    `json:"confirmed_session_id"`
	ReplacedNonce     string     `json:"replaced_nonce"`
	CurrentSerial     string     `json:"current_serial"`
	NextSerial        string     `json:"next_serial"`
	CertificateEnds   *time.Time `json:"certificate_not_after"`
	IssuerFingerprint string     `json:"issuer_fingerprint"`
	Mints             int32      `json:"mints"`
	RefusedRegisters  int32      `json:"refused_registers"`
	LastRefusal       string     `json:"last_refusal"`
	AuthoritySeq      int64      `json:"authority_seq"`
	Version           int64      `json:"version"`
}

func nullable[T comparable](v T) *T {
	var zero T
	if v == zero {
		return nil
	}
	return &v
}

func (r *Record) row() row {
	out := row{
		NodeID: r.NodeID, InstanceID: nullable(r.InstanceID), State: names.Of(r.State), StateReason: r.StateReason, StateBy: r.StateBy,
		StateAt: r.StateAt, Alarm: r.Alarm, FenceEpoch: r.FenceEpoch, FenceAcked: r.FenceAcked, Told: r.Told, ToldAcked: r.ToldAcked,
		Issued: r.Issued, Confirmed: r.Confirmed, ConfirmedSession: nullable(r.ConfirmedSession), ReplacedNonce: r.ReplacedNonce,
		CurrentSerial: r.CurrentSerial, NextSerial: r.NextSerial, CertificateEnds: nullable(r.CertificateEnds),
		IssuerFingerprint: r.IssuerFingerprint, Mints: r.Mints, RefusedRegisters: r.RefusedRegisters, AuthoritySeq: r.AuthoritySeq, Version: r.Version,
	}
	if r.LastRefusal != commonv1.Reason_REASON_UNSPECIFIED {
		out.LastRefusal = names.Of(r.LastRefusal)
	}
	return out
}

// Save writes changed records and their events, and numbers them for the authority view. It is the last thing a transaction does: the lock it
// takes is held to the commit by whoever changes any node. The answer is the id of the last event.
func Save(ctx context.Context, tx pgx.Tx, records ...*Record) (string, error) {
	if len(records) == 0 {
		return "", nil
	}
	if _, err := tx.Exec(ctx, `SELECT pg_advisory_xact_lock($1)`, int64(authorityLock)); err != nil {
		return "", fmt.Errorf("take authority lock: %w", err)
	}
	var first int64
	// The statement after the lock reads what its last holder committed.
	err := tx.QueryRow(ctx, `UPDATE recovery.authority_head SET seq = mesh.next(seq) + $1 RETURNING seq - $1`, int64(len(records)-1)).Scan(&first)
	if err != nil {
		return "", fmt.Errorf("draw authority numbers: %w", err)
	}
	for i, r := range records {
		r.AuthoritySeq = first + int64(i)
	}
	return write(ctx, tx, records)
}

// SaveQuietly writes changed records and their events without telling the authority view: for changes that decide nothing there.
func SaveQuietly(ctx context.Context, tx pgx.Tx, records ...*Record) (string, error) {
	if len(records) == 0 {
		return "", nil
	}
	return write(ctx, tx, records)
}

func write(ctx context.Context, tx pgx.Tx, records []*Record) (string, error) {
	rows := make([]row, len(records))
	evs := make([]events.Event, len(records), 2*len(records))
	correlation := obs.From(ctx).CorrelationID
	for i, r := range records {
		r.Version++
		r.correlationForNext = correlation
		rows[i], evs[i] = r.row(), r.event()
		if r.decided != "" {
			evs = append(evs, audit.Event(ctx, r.decision()))
		}
	}
	encoded, err := json.Marshal(rows)
	if err != nil {
		return "", fmt.Errorf("encode nodes: %w", err)
	}
	tag, err := tx.Exec(ctx, `
		UPDATE recovery.identity i SET
			node_instance_id = n.node_instance_id, state = n.state, state_reason = n.state_reason, state_by = n.state_by, state_at = n.state_at,
			alarm = n.alarm, fence_epoch = n.fence_epoch, fence_acked = n.fence_acked, told = n.told, told_acked = n.told_acked,
			told_at = CASE WHEN n.told > i.told THEN mesh.clock() ELSE i.told_at END,
			issued = n.issued, confirmed = n.confirmed, confirmed_session_id = n.confirmed_session_id, replaced_nonce = n.replaced_nonce,
			current_serial = n.current_serial, next_serial = n.next_serial, certificate_not_after = n.certificate_not_after,
			issuer_fingerprint = n.issuer_fingerprint, mints = n.mints, refused_registers = n.refused_registers, last_refusal = n.last_refusal,
			authority_seq = n.authority_seq, version = n.version
		FROM jsonb_to_recordset($1::jsonb) AS n (node_id uuid, node_instance_id uuid, state text, state_reason text, state_by text,
			state_at timestamptz, alarm text, fence_epoch bigint, fence_acked bigint, told bigint, told_acked bigint, issued bigint,
			confirmed bigint, confirmed_session_id uuid, replaced_nonce text, current_serial text, next_serial text,
			certificate_not_after timestamptz, issuer_fingerprint text, mints integer, refused_registers integer, last_refusal text,
			authority_seq bigint, version bigint)
		WHERE i.node_id = n.node_id AND i.version = n.version - 1`, string(encoded))
	if err != nil {
		return "", fmt.Errorf("update nodes: %w", err)
	}
	if tag.RowsAffected() != int64(len(records)) {
		return "", fault.New(commonv1.Reason_REASON_CONFLICT, "the node was changed by someone else in the meantime")
	}
	pos, err := events.Append(ctx, tx, evs...)
	if err != nil {
		return "", fmt.Errorf("append node events: %w", err)
	}
	for _, r := range records {
		r.decided = ""
	}
	return pos, nil
}
