package auditlog

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
)

const (
	// verifyBatch is how many rows of the audit log are compared at a time.
	verifyBatch = 500
	// verifyLimit is how long a check may take. It keeps one snapshot of the database open for the whole time.
	verifyLimit = 10 * time.Minute
)

// Verdict is the result of a check of the audit log.
type Verdict struct {
	Rows int64 // number of the last row that fits
	// From is the number of the row up to which rows were cut, which a signed checkpoint allows; zero: none were cut.
	From     int64
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

type logRow struct {
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
func (l *Log) Verify(ctx context.Context) (Verdict, error) {
	if !l.checking.TryLock() {
		return Verdict{}, fault.New(commonv1.Reason_REASON_OVERLOADED, "the audit log is being checked",
			fault.RetryAfter(10*time.Second))
	}
	defer l.checking.Unlock()
	ctx, cancel := context.WithTimeout(ctx, verifyLimit)
	defer cancel()
	tx, err := l.db.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
	if err != nil {
		return Verdict{}, fmt.Errorf("verify the audit log: %w", err)
	}
	defer tx.Rollback(context.WithoutCancel(ctx)) // nothing is kept
	w := walk{tx: tx, last: make([]byte, sha256.Size)}
	if err := w.run(ctx, l.keys.Load()); err != nil {
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

type ends struct {
	Until int64 `db:"until"`
	First int64 `db:"first"`
	// FirstRow is the number of the first row, or one more than the last number if there is no row.
	FirstRow int64 `db:"first_row"`
	headRow
}

var (
	readEnd = pg.Define(pg.RoleReadmodel, "auditlog.end_of_audit", `
	SELECT COALESCE((SELECT c.pos FROM readmodel.event_cursor c WHERE c.name = $1), 0) AS until,
		COALESCE((SELECT n.first_pos FROM events.numbered n ORDER BY n.last_pos LIMIT 1), 0) AS first,
		COALESCE((SELECT min(a.number) FROM readmodel.audit a), (SELECT h.number + 1
			FROM readmodel.audit_head h), 1) AS first_row,
		COALESCE((SELECT h.number FROM readmodel.audit_head h), 0) AS number, COALESCE((SELECT h.hash
			FROM readmodel.audit_head h), '') AS hash`)
	rowsAfter = pg.Define(pg.RoleReadmodel, "auditlog.audit_rows_after", `
	SELECT `+pg.Columns[logRow]("a")+` FROM readmodel.audit a WHERE a.number > $1 ORDER BY a.number LIMIT $2`)
)

// run checks the whole log.
func (w *walk) run(ctx context.Context, keys *CheckpointKeys) error {
	end, err := pg.One[ends](ctx, w.tx, readEnd, ConsumerName)
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
	end, err := pg.One[ends](ctx, w.tx, readEnd, ConsumerName)
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

func (w *walk) rows(ctx context.Context) ([]logRow, error) {
	out, err := pg.All[logRow](ctx, w.tx, rowsAfter, w.verdict.Rows, verifyBatch)
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
func (w *walk) step(ctx context.Context, row logRow) error {
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
