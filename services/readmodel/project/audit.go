package project

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
)

// AuditConsumerName is the name of the cursor of the audit log.
const AuditConsumerName = "audit"

const (
	// verifyBatch is how many rows of the audit log are compared at a time.
	verifyBatch = 500
	// verifyLimit is how long a check may take. It keeps one snapshot of the database open for the whole time.
	verifyLimit = 10 * time.Minute
)

// Audit writes and checks the audit log: its rows are in the order of their events' positions, and each has a hash that
// covers the row before it.
type Audit struct {
	db       *pgxpool.Pool
	logger   *slog.Logger
	consumer *events.Consumer
	checking sync.Mutex
	keys     atomic.Pointer[CheckpointKeys]
	// signedUpTo is the number of the last checkpoint that this replica has signed.
	signedUpTo atomic.Int64
}

// NewAudit returns the audit log's consumer. It does not access the database.
func NewAudit(deps Deps) (*Audit, error) {
	consumer, err := events.NewConsumer(events.ConsumerDeps{
		Pool: deps.DB, Numbered: deps.Numbered, Wake: deps.Wake,
		Logger: deps.Logger,
	}, events.ConsumerConfig{
		Name: AuditConsumerName, Schema: "readmodel", Kinds: []string{audit.Kind}, AsyncCommit: true,
	})
	if err != nil {
		return nil, fmt.Errorf("build consumer of the audit log: %w", err)
	}
	return &Audit{db: deps.DB, logger: deps.Logger, consumer: consumer}, nil
}

// Run appends entries until ctx ends.
func (a *Audit) Run(ctx context.Context) error {
	return a.consumer.Run(ctx, appendAudit)
}

// Drain appends everything that is numbered, for tests and tools.
func (a *Audit) Drain(ctx context.Context) error {
	return a.consumer.Drain(ctx, appendAudit)
}

// WaitFor waits until a command's position token is in the log, as Projector.WaitFor does.
func (a *Audit) WaitFor(ctx context.Context, token string) error {
	return waitFor(ctx, a.consumer, token)
}

type auditHead struct {
	Number int64  `db:"number"`
	Hash   []byte `db:"hash"`
}

var (
	lockAuditHead = pg.Define(pg.RoleReadmodel, "project.lock_audit_head",
		`SELECT number, hash FROM readmodel.audit_head FOR UPDATE`)
	insertAuditRow = pg.Define(pg.RoleReadmodel, "project.insert_audit", `
	INSERT INTO readmodel.audit (number, pos, event_id, source, entry, previous_hash, hash)
		VALUES ($1, $2, $3, $4, $5, $6, $7)`)
	moveAuditHead = pg.Define(pg.RoleReadmodel, "project.move_audit_head",
		`UPDATE readmodel.audit_head SET number = $1, hash = $2`)
)

// appendAudit implements events.Apply. The log has no gaps: an entry that cannot be appended is retried and never
// skipped.
func appendAudit(ctx context.Context, tx pgx.Tx, r events.Record) error {
	entry, err := canonical(r)
	if err != nil {
		return events.Later(err)
	}
	head, err := pg.One[auditHead](ctx, tx, lockAuditHead)
	if err != nil {
		return events.Later(fmt.Errorf("read end of the audit log: %w", err))
	}
	number := head.Number + 1
	hash := link(head.Hash, entry, r.ID, r.Source)
	err = pg.Queue(ctx, tx, insertAuditRow, number, r.Pos, r.ID, r.Source, string(entry), head.Hash, hash)
	if err == nil {
		_, err = pg.Exec(ctx, tx, moveAuditHead, number, hash)
	}
	if err != nil {
		return events.Later(fmt.Errorf("append to the audit log: %w", err))
	}
	return nil
}

// canonical returns the form of an entry that is hashed: the event's payload with its time and the service that wrote
// it, keys in order, no space. It is made from the stored JSON, so that it stays the same when a later build knows more
// fields.
func canonical(r events.Record) ([]byte, error) {
	stored, err := r.Payload()
	if err != nil {
		return nil, fmt.Errorf("read audit entry %s: %w", r.ID, err)
	}
	decoder := json.NewDecoder(bytes.NewReader(stored))
	decoder.UseNumber()
	var payload any
	if err := decoder.Decode(&payload); err != nil {
		return nil, fmt.Errorf("read audit entry %s: %w", r.ID, err)
	}
	entry, ok := payload.(map[string]any)
	if !ok {
		entry = map[string]any{"details": map[string]any{"payload": payload}}
	}
	entry["at"] = r.CreatedAt.UTC().Format(time.RFC3339Nano)
	if actor, _ := entry["actor"].(string); actor == "" {
		entry["actor"] = "service/" + r.Source
	}
	out, err := json.Marshal(entry)
	if err != nil {
		return nil, fmt.Errorf("encode audit entry %s: %w", r.ID, err)
	}
	return out, nil
}

// link returns the hash of a row. Each part is preceded by its length, so that no two different rows hash the same
// bytes.
func link(previous, entry []byte, eventID, source string) []byte {
	h := sha256.New()
	for _, part := range [][]byte{previous, entry, []byte(eventID), []byte(source)} {
		fmt.Fprintf(h, "%d:", len(part))
		h.Write(part)
	}
	return h.Sum(nil)
}

// Verdict is the result of a check of the audit log.
type Verdict struct {
	Rows     int64 // number of the last row that fits
	From     int64 // number of the signed checkpoint up to which rows were cut; zero: none were cut
	Head     string
	BrokenAt int64 // number of the first row that does not fit, zero if all do
	Because  string
	// Signed is the number of the last row that fits a signed checkpoint, and SignedAt the time of its signature; zero
	// without one.
	Signed   int64
	SignedAt time.Time
	// Unsigned counts the checkpoints whose row fits and whose signature is not valid; UnsignedBecause names the first of
	// them, and why.
	Unsigned        int64
	UnsignedBecause string
}

// Intact reports whether every row follows from the one before and from its event.
func (v Verdict) Intact() bool { return v.BrokenAt == 0 }

type auditRow struct {
	Number   int64  `db:"number"`
	Pos      int64  `db:"pos"`
	EventID  string `db:"event_id" expr:"@.event_id::text"`
	Source   string `db:"source"`
	Entry    string `db:"entry"`
	Previous []byte `db:"previous_hash"`
	Hash     []byte `db:"hash"`
}

// Verify compares the audit log with the events row by row, in one snapshot. For rows whose events have been cut at the
// end of their term it checks the chain alone. It stops at the first row that does not fit. A replica runs one check at
// a time; another one is refused as overloaded.
func (a *Audit) Verify(ctx context.Context) (Verdict, error) {
	if !a.checking.TryLock() {
		return Verdict{}, fault.New(commonv1.Reason_REASON_OVERLOADED, "the audit log is being checked",
			fault.RetryAfter(10*time.Second))
	}
	defer a.checking.Unlock()
	ctx, cancel := context.WithTimeout(ctx, verifyLimit)
	defer cancel()
	tx, err := a.db.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
	if err != nil {
		return Verdict{}, fmt.Errorf("verify the audit log: %w", err)
	}
	defer tx.Rollback(context.WithoutCancel(ctx)) // nothing is kept
	w := walk{tx: tx, last: make([]byte, sha256.Size)}
	if err := w.run(ctx, a.keys.Load()); err != nil {
		return Verdict{}, fmt.Errorf("verify the audit log: %w", err)
	}
	w.verdict.Head = hex.EncodeToString(w.last)
	return w.verdict, nil
}

// walk is the state of a check.
type walk struct {
	tx      pgx.Tx
	verdict Verdict
	last    []byte // hash of the last row that fits

	until, after int64 // positions: that of the cursor, and the one up to which events were read
	first        int64 // the first position whose event is still there: rows before it are checked by their chain alone
	log          []events.Record
	keys         *CheckpointKeys
	checkpoints  []checkpoint // those whose row was not reached yet
}

func (w *walk) broken(at int64, because string) { w.verdict.BrokenAt, w.verdict.Because = at, because }

type auditEnd struct {
	Until int64 `db:"until"`
	First int64 `db:"first"`
	// FirstRow is the number of the first row, or one more than the last number if there is no row.
	FirstRow int64 `db:"first_row"`
	auditHead
}

var (
	endOfAudit = pg.Define(pg.RoleReadmodel, "project.end_of_audit", `
	SELECT COALESCE((SELECT c.pos FROM readmodel.event_cursor c WHERE c.name = $1), 0) AS until,
		COALESCE((SELECT n.first_pos FROM events.numbered n ORDER BY n.last_pos LIMIT 1), 0) AS first,
		COALESCE((SELECT min(a.number) FROM readmodel.audit a), (SELECT h.number + 1
			FROM readmodel.audit_head h), 1) AS first_row,
		COALESCE((SELECT h.number FROM readmodel.audit_head h), 0) AS number, COALESCE((SELECT h.hash
			FROM readmodel.audit_head h), '') AS hash`)
	auditRowsAfter = pg.Define(pg.RoleReadmodel, "project.audit_rows_after", `
	SELECT `+pg.Columns[auditRow]("a")+` FROM readmodel.audit a WHERE a.number > $1 ORDER BY a.number LIMIT $2`)
)

// run checks the whole log.
func (w *walk) run(ctx context.Context, keys *CheckpointKeys) error {
	end, err := pg.One[auditEnd](ctx, w.tx, endOfAudit, AuditConsumerName)
	if err != nil {
		return fmt.Errorf("read its end: %w", err)
	}
	if err := w.anchored(ctx, keys, end.FirstRow); err != nil || !w.verdict.Intact() {
		return err
	}
	if err := w.follow(ctx); err != nil || !w.verdict.Intact() {
		return err
	}
	for i := range w.checkpoints {
		if c := &w.checkpoints[i]; c.Number > w.verdict.Rows && c.problem(keys) == "" {
			w.broken(w.verdict.Rows+1, "the log ends before row "+itoa(c.Number)+", which was signed at "+
				c.At.UTC().Format(time.RFC3339))
			return nil
		}
	}
	return nil
}

// follow checks the rows from the walk's current place to the end.
func (w *walk) follow(ctx context.Context) error {
	end, err := pg.One[auditEnd](ctx, w.tx, endOfAudit, AuditConsumerName)
	if err != nil {
		return fmt.Errorf("read its end: %w", err)
	}
	w.until, w.first = end.Until, end.First
	for w.verdict.Intact() {
		rows, err := w.rows(ctx)
		if err != nil {
			return err
		}
		for _, row := range rows {
			if err := w.step(ctx, row); err != nil || !w.verdict.Intact() {
				return err
			}
			if w.passed(row); !w.verdict.Intact() {
				return nil
			}
		}
		if len(rows) == 0 {
			break
		}
	}
	next := w.verdict.Rows + 1
	left, err := w.event(ctx)
	switch {
	case err != nil:
		return err
	case left != nil:
		w.broken(next, "the log ends before row "+itoa(next)+", whose event "+left.ID+" is there")
	case end.Number != w.verdict.Rows:
		w.broken(min(next, end.Number+1), fmt.Sprintf("the log has %d rows, and was %d long", w.verdict.Rows, end.Number))
	case !bytes.Equal(end.Hash, w.last):
		w.broken(w.verdict.Rows, "the last row is not the one that was written last")
	}
	return nil
}

func itoa(n int64) string { return fmt.Sprint(n) }

func (w *walk) rows(ctx context.Context) ([]auditRow, error) {
	out, err := pg.All[auditRow](ctx, w.tx, auditRowsAfter, w.verdict.Rows, verifyBatch)
	if err != nil {
		return nil, fmt.Errorf("read rows: %w", err)
	}
	return out, nil
}

// event returns the next event of the log up to the cursor, nil at its end. step consumes it.
func (w *walk) event(ctx context.Context) (*events.Record, error) {
	for len(w.log) == 0 && w.after < w.until {
		records, next, err := events.Read(ctx, w.tx, w.after, []string{audit.Kind}, verifyBatch)
		if err != nil {
			return nil, err
		}
		if next <= w.after {
			return nil, errors.New("the event log ends before the cursor")
		}
		w.log, w.after = records, next
	}
	if len(w.log) == 0 || w.log[0].Pos > w.until {
		return nil, nil
	}
	return &w.log[0], nil
}

// step compares one row with the row before, with itself and with its event.
func (w *walk) step(ctx context.Context, row auditRow) error {
	number := w.verdict.Rows + 1
	e, err := w.event(ctx)
	if err != nil {
		return err
	}
	var entry []byte
	if e != nil {
		if entry, err = canonical(*e); err != nil {
			return err
		}
	}
	switch {
	case row.Number != number:
		w.broken(number, "row "+itoa(number)+" is missing")
	case !bytes.Equal(row.Previous, w.last):
		w.broken(number, "it does not follow from the row before")
	case !bytes.Equal(row.Hash, link(row.Previous, []byte(row.Entry), row.EventID, row.Source)):
		w.broken(number, "the row was changed after it was written")
	case row.Pos < w.first:
		w.verdict.Rows, w.last = number, row.Hash
	case e == nil || e.Pos > row.Pos:
		w.broken(number, "its event "+row.EventID+" is gone")
	case e.Pos < row.Pos:
		w.broken(number, "event "+e.ID+" has no row before it")
	case e.ID != row.EventID || e.Source != row.Source || string(entry) != row.Entry:
		w.broken(number, "its event says something else")
	default:
		w.verdict.Rows, w.last, w.log = number, row.Hash, w.log[1:]
	}
	return nil
}

// waitFor waits until a consumer reaches a position token. It returns a fault if the consumer does not reach it in
// time.
func waitFor(ctx context.Context, c *events.Consumer, token string) error {
	err := c.WaitFor(ctx, token)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, events.ErrUnknownPosition):
		return fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "min_pos is not a position that a command answered",
			fault.Unmet("min_pos: unknown position"), fault.Cause(err))
	case errors.Is(err, events.ErrBehind):
		return fault.New(commonv1.Reason_REASON_POSITION_NOT_REACHED, "", fault.RetryAfter(500*time.Millisecond),
			fault.Cause(err))
	default:
		return fmt.Errorf("wait for min_pos: %w", err)
	}
}
