package identity

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
)

// authorityLock makes the order of authority numbers the order of commits.
const authorityLock = 0x67707561_0020

// storedRecord is a record as it is stored.
type storedRecord struct {
	Record
	StateText   string     `db:"state"`
	RefusalText string     `db:"last_refusal"`
	Ends        *time.Time `db:"certificate_not_after"`
}

// read returns the record of a row. A state that this build does not know is reported by package aside and left
// unspecified: the node opens no session and is told to wait, and its row is left unchanged. Other nodes are not
// affected.
func (s *storedRecord) read(ctx context.Context) *Record {
	var err error
	r := &s.Record
	if r.State, err = names.Parse[commonv1.NodeIdentityState](s.StateText); err != nil {
		r.unreadState = s.StateText
		aside.Note(ctx, "identity", r.NodeID, err)
	}
	if s.RefusalText != "" {
		if r.LastRefusal, err = names.Parse[commonv1.Reason](s.RefusalText); err != nil {
			r.unreadRefusal = s.RefusalText
			aside.Note(ctx, "identity", r.NodeID, err)
		}
	}
	if s.Ends != nil {
		r.CertificateEnds = *s.Ends
	}
	return r
}

// readAll runs a statement that returns nodes.
func readAll(ctx context.Context, q pg.Querier, s *pg.Statement, args ...any) ([]*Record, error) {
	rows, err := pg.All[storedRecord](ctx, q, s, args...)
	if err != nil {
		return nil, fmt.Errorf("read nodes: %w", err)
	}
	out := make([]*Record, len(rows))
	for i := range rows {
		out[i] = rows[i].read(ctx)
	}
	return out, nil
}

// Moment is the database's time and era inside a transaction, and whether rollback mode is active.
type Moment struct {
	Now        time.Time `db:"now"`
	Era        int64     `db:"era"`
	RolledBack bool      `db:"rolled_back"`
}

// ReadMoment returns the moment of the current transaction.
func ReadMoment(ctx context.Context, q pg.Querier) (Moment, error) {
	m, err := pg.One[Moment](ctx, q, readMoment)
	if err != nil {
		return Moment{}, fmt.Errorf("read clock, era and rollback mode: %w", err)
	}
	return m, nil
}

// Lock reads nodes for a change, in the order of their ids so that two batches never deadlock. Unknown ids are missing
// from the result.
func Lock(ctx context.Context, tx pgx.Tx, nodeIDs ...string) (map[string]*Record, error) {
	list, err := readAll(ctx, tx, lockNodes, nodeIDs)
	if err != nil {
		return nil, fmt.Errorf("lock nodes: %w", err)
	}
	out := make(map[string]*Record, len(list))
	for _, r := range list {
		out[r.NodeID] = r
	}
	return out, nil
}

// LockOne locks and returns one node; fault identity_unknown if there is none.
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

// GetByName locks and returns the live node of a name; nil if there is none.
func GetByName(ctx context.Context, tx pgx.Tx, name string) (*Record, error) {
	row, err := pg.One[storedRecord](ctx, tx, lockByName, name)
	if pg.IsNoRows(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read node by name: %w", err)
	}
	return row.read(ctx), nil
}

// Insert writes the row of a new, pending node and its first event, and returns the event's id.
func Insert(ctx context.Context, tx pgx.Tx, r *Record) (string, error) {
	m, err := ReadMoment(ctx, tx)
	if err != nil {
		return "", err
	}
	r.State, r.StateAt, r.CreatedAt, r.Version = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_PENDING, m.Now, m.Now, 0
	_, err = pg.Exec(ctx, tx, insertNode, r.NodeID, r.Name, r.StateBy, r.StateReason, m.Now, r.WorkspaceID, r.TenantID,
		r.Epoch, r.LaunchedInstanceID, r.Profile)
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
	Notice            int64      `json:"told"`
	NoticeAcked       int64      `json:"told_acked"`
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
	JoinKeys          []string   `json:"join_keys"`
	Profile           string     `json:"profile"`
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
		NodeID: r.NodeID, InstanceID: nullable(r.InstanceID), State: names.Of(r.State), StateReason: r.StateReason,
		StateBy: r.StateBy, StateAt: r.StateAt, Alarm: r.Alarm, FenceEpoch: r.FenceEpoch, FenceAcked: r.FenceAcked,
		Notice: r.Notice, NoticeAcked: r.NoticeAcked, Issued: r.Issued, Confirmed: r.Confirmed,
		ConfirmedSession: nullable(r.ConfirmedSession), ReplacedNonce: r.ReplacedNonce, CurrentSerial: r.CurrentSerial,
		NextSerial: r.NextSerial, CertificateEnds: nullable(r.CertificateEnds), IssuerFingerprint: r.IssuerFingerprint,
		Mints: r.Mints, RefusedRegisters: r.RefusedRegisters, AuthoritySeq: r.AuthoritySeq, Profile: r.Profile,
		Version: r.Version,
	}
	out.JoinKeys = append([]string{}, r.JoinKeys...)
	if r.State == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_UNSPECIFIED && r.unreadState != "" {
		out.State = r.unreadState
	}
	switch {
	case r.LastRefusal != commonv1.Reason_REASON_UNSPECIFIED:
		out.LastRefusal = names.Of(r.LastRefusal)
	case r.RefusedRegisters > 0:
		out.LastRefusal = r.unreadRefusal
	}
	return out
}

// Save writes changed records and their events, and numbers them for the authority view. It belongs at the end of a
// transaction: each Save takes the same lock and holds it to the commit, so that statements after it delay the changes
// of all nodes. Save returns the id of the last event.
func Save(ctx context.Context, tx pgx.Tx, records ...*Record) (string, error) {
	if len(records) == 0 {
		return "", nil
	}
	if err := noteActions(ctx, tx, records); err != nil {
		return "", err
	}
	if _, err := pg.Exec(ctx, tx, takeAuthorityLock, int64(authorityLock)); err != nil {
		return "", fmt.Errorf("take authority lock: %w", err)
	}
	// The statement after the lock sees what the last holder of the lock committed.
	first, err := pg.Value[int64](ctx, tx, drawNumbers, int64(len(records)-1))
	if err != nil {
		return "", fmt.Errorf("draw authority numbers: %w", err)
	}
	for i, r := range records {
		r.AuthoritySeq = first + int64(i)
	}
	return write(ctx, tx, records)
}

// SaveQuietly writes changed records and their events without an authority number, for changes that do not matter to
// the authority view.
func SaveQuietly(ctx context.Context, tx pgx.Tx, records ...*Record) (string, error) {
	if len(records) == 0 {
		return "", nil
	}
	return write(ctx, tx, records)
}

func write(ctx context.Context, tx pgx.Tx, records []*Record) (string, error) {
	rows := make([]row, len(records))
	evs := make([]events.Event, 0, 2*len(records))
	correlation := obs.From(ctx).CorrelationID
	for i, r := range records {
		r.Version++
		r.correlationForNext = cmp.Or(r.correlated, correlation)
		rows[i] = r.row()
		if r.announced() {
			evs = append(evs, r.event())
		}
		if r.decided != "" {
			evs = append(evs, audit.Event(ctx, r.decision()))
		}
	}
	encoded, err := json.Marshal(rows)
	if err != nil {
		return "", fmt.Errorf("encode nodes: %w", err)
	}
	tag, err := pg.Exec(ctx, tx, updateNodes, string(encoded))
	if err != nil {
		return "", fmt.Errorf("update nodes: %w", err)
	}
	if tag.RowsAffected() != int64(len(records)) {
		return "", fault.New(commonv1.Reason_REASON_CONFLICT, "the node was changed by another request in the meantime")
	}
	var pos string
	if len(evs) > 0 {
		if pos, err = events.Append(ctx, tx, evs...); err != nil {
			return "", fmt.Errorf("append node events: %w", err)
		}
	}
	for _, r := range records {
		r.decided, r.correlated, r.plain = "", "", false
	}
	return pos, nil
}

// TakeUnacknowledged returns at most n nodes of which lifecycle has not acknowledged the last decision, and sets when
// they are due again.
func TakeUnacknowledged(ctx context.Context, q pg.Querier, n int, again time.Duration) ([]*Record, error) {
	due, err := readAll(ctx, q, takeUnacknowledged, n, again.Seconds())
	if err != nil {
		return nil, fmt.Errorf("take unacknowledged nodes: %w", err)
	}
	return due, nil
}

// raiseIssued writes issued generations alone. No consumer needs one until it is confirmed, so there is neither an
// event nor an authority number.
func raiseIssued(ctx context.Context, tx pgx.Tx, records map[string]*Record, keyID string) error {
	if len(records) == 0 {
		return nil
	}
	var nodeIDs []string
	var issued []int64
	for _, r := range records {
		nodeIDs, issued = append(nodeIDs, r.NodeID), append(issued, r.Issued)
	}
	tag, err := pg.Exec(ctx, tx, raiseGenerations, nodeIDs, issued, keyID)
	if err != nil {
		return fmt.Errorf("raise generations: %w", err)
	}
	if tag.RowsAffected() != int64(len(records)) {
		return fault.New(commonv1.Reason_REASON_CONFLICT, "")
	}
	return nil
}
