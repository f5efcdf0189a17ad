package pg

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Queue adds a statement whose result the caller does not need to a transaction of InTx: it goes to the server with the
// next statement, or with the commit, in the same round trip and in the order of the calls. If it fails, the call that
// it was sent with returns the error. On any other transaction it is executed at once.
func Queue(ctx context.Context, tx pgx.Tx, s *Statement, args ...any) error {
	if p, ok := tx.(*pipelined); ok && p.conn != nil {
		p.pending = append(p.pending, statement{s.text, args})
		return nil
	}
	_, err := tx.Exec(ctx, s.text, args...)
	return err
}

// OnEnd has a transaction of InTx call fn when it has ended, or the savepoint that it is called in was undone:
// committed reports whether the changes made in it stand. It is false where the outcome is not known. On any other
// transaction OnEnd does nothing and returns false.
func OnEnd(tx pgx.Tx, fn func(committed bool)) bool {
	var p *pipelined
	switch x := tx.(type) {
	case *pipelined:
		p = x
	case *savepoint:
		p = x.pipelined
	}
	if p == nil || p.conn == nil {
		return false
	}
	p.onEnd = append(p.onEnd, fn)
	return true
}

// OutcomeUnknown reports whether the answer to the COMMIT of a transaction of InTx was lost, for a function of OnEnd
// that has to tell this from a transaction that was not committed.
func OutcomeUnknown(tx pgx.Tx) bool {
	switch x := tx.(type) {
	case *pipelined:
		return x.unknown
	case *savepoint:
		return x.unknown
	}
	return false
}

// statement is queued until the next round trip.
type statement struct {
	sql  string
	args []any
}

// pipelined is a transaction that spends round trips only where the caller needs a result: BEGIN goes with the first
// statement, a queued statement with the next one, and COMMIT with those queued last. A transaction that has executed
// nothing has never begun at the server.
type pipelined struct {
	conn    *pgxpool.Conn // nil once the transaction has ended
	pending []statement
	onEnd   []func(committed bool)
	begun   bool // BEGIN was sent

	committed bool // it ended, and what was done in it stands
	unknown   bool // the answer to its COMMIT was lost
}

func begin(ctx context.Context, pool *pgxpool.Pool, sql string) (*pipelined, error) {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	return &pipelined{conn: conn, pending: []statement{{sql: sql}}}, nil
}

// flush sends the pending statements together with those that add queues. The caller reads the answers from add's first
// one on.
func (p *pipelined) flush(ctx context.Context, add func(*pgx.Batch)) (pgx.BatchResults, error) {
	if p.conn == nil {
		return nil, pgx.ErrTxClosed
	}
	pending := p.pending
	p.pending, p.begun = nil, true
	b := &pgx.Batch{}
	for _, s := range pending {
		b.Queue(s.sql, s.args...)
	}
	add(b)
	answers := p.conn.SendBatch(ctx, b)
	for range pending {
		if _, err := answers.Exec(); err != nil {
			err = errors.Join(err, closing(answers, err))
			p.endUnbegun()
			return nil, err
		}
	}
	return answers, nil
}

// endUnbegun ends a transaction whose BEGIN was never executed: the driver prepares statements it does not know before
// it sends anything else, and a statement that is refused there leaves the connection outside of any transaction. The
// next statement would be committed by itself.
func (p *pipelined) endUnbegun() {
	if conn := p.conn.Conn(); !conn.IsClosed() && conn.PgConn().TxStatus() == 'I' {
		p.release()
	}
}

// closing closes the answers and joins the error of that to the known one.
func closing(answers pgx.BatchResults, known error) error {
	err := answers.Close()
	if err == nil || errors.Is(known, err) || err.Error() == known.Error() {
		return nil
	}
	return err
}

// Exec implements pgx.Tx.
func (p *pipelined) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if p.conn == nil {
		return pgconn.CommandTag{}, pgx.ErrTxClosed
	}
	if len(args) == 0 && strings.Contains(sql, ";") { // several statements, which no pipeline takes as one
		if err := p.sendPending(ctx); err != nil {
			return pgconn.CommandTag{}, err
		}
	}
	if len(p.pending) == 0 {
		return p.conn.Exec(ctx, sql, args...)
	}
	answers, err := p.flush(ctx, func(b *pgx.Batch) { b.Queue(sql, args...) })
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	tag, err := answers.Exec()
	if closed := answers.Close(); err == nil {
		err = closed
	}
	return tag, err
}

// Query implements pgx.Tx.
func (p *pipelined) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if p.conn == nil {
		return failedRows{err: pgx.ErrTxClosed}, pgx.ErrTxClosed
	}
	if len(p.pending) == 0 {
		return p.conn.Query(ctx, sql, args...)
	}
	answers, err := p.flush(ctx, func(b *pgx.Batch) { b.Queue(sql, args...) })
	if err != nil {
		return failedRows{err: err}, err
	}
	rows, err := answers.Query()
	if err != nil {
		err = errors.Join(err, closing(answers, err))
		return failedRows{err: err}, err
	}
	return &answeredRows{Rows: rows, answers: answers}, nil
}

// QueryRow implements pgx.Tx.
func (p *pipelined) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	rows, err := p.Query(ctx, sql, args...)
	return oneRow{rows: rows, err: err}
}

// SendBatch implements pgx.Tx.
func (p *pipelined) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	answers, err := p.flush(
		ctx, func(with *pgx.Batch) { with.QueuedQueries = append(with.QueuedQueries, b.QueuedQueries...) },
	)
	if err != nil {
		return failedBatch{err: err}
	}
	return answers
}

// Begin starts a savepoint. The pending statements come before it.
func (p *pipelined) Begin(ctx context.Context) (pgx.Tx, error) {
	const name = "pipelined"
	if _, err := p.Exec(ctx, "savepoint "+name); err != nil {
		return nil, err
	}
	return &savepoint{pipelined: p, name: name, ends: len(p.onEnd)}, nil
}

// Commit implements pgx.Tx.
func (p *pipelined) Commit(ctx context.Context) error {
	if p.conn == nil {
		return pgx.ErrTxClosed
	}
	if !p.begun && len(p.pending) == 1 { // BEGIN alone
		p.committed = true
		p.release()
		return nil
	}
	tag, err := p.Exec(ctx, "commit")
	if err != nil {
		switch {
		case p.conn == nil: // it had not begun
			return errors.Join(err, pgx.ErrTxCommitRollback)
		case p.conn.Conn().IsClosed():
			p.unknown = commitIsUnknown(err)
			p.release()
			return err
		case p.conn.Conn().PgConn().TxStatus() != 'I':
			// A statement that was refused leaves the transaction open, as a refused commit does not.
			_ = p.Rollback(ctx) // the refusal is what counts; a connection that is not clean is closed
		default:
			p.release()
		}
		// Over a live connection the outcome is known, whatever the error: the transaction is not committed.
		return errors.Join(err, pgx.ErrTxCommitRollback)
	}
	p.committed = tag.String() != "ROLLBACK"
	p.release()
	if tag.String() == "ROLLBACK" {
		return pgx.ErrTxCommitRollback
	}
	return nil
}

// Rollback implements pgx.Tx.
func (p *pipelined) Rollback(ctx context.Context) error {
	if p.conn == nil {
		return pgx.ErrTxClosed
	}
	defer p.release()
	if !p.begun || p.conn.Conn().IsClosed() {
		return nil
	}
	if _, err := p.conn.Exec(ctx, "rollback"); err != nil {
		_ = p.conn.Conn().Close(ctx) // it is closed to be rid of it
		return fmt.Errorf("roll back: %w", err)
	}
	return nil
}

func (p *pipelined) release() {
	p.conn.Release()
	p.conn, p.pending = nil, nil
	p.callOnEnd(0, p.committed)
}

// callOnEnd calls the functions of OnEnd, from the one at index from on.
func (p *pipelined) callOnEnd(from int, committed bool) {
	calls := p.onEnd[from:]
	p.onEnd = p.onEnd[:from:from]
	for _, fn := range calls {
		fn(committed)
	}
}

// Conn implements pgx.Tx. A caller that uses the connection itself does not see the pending statements.
func (p *pipelined) Conn() *pgx.Conn {
	if p.conn == nil {
		return nil
	}
	return p.conn.Conn()
}

// sendPending sends the pending statements, before the connection itself is used.
func (p *pipelined) sendPending(ctx context.Context) error {
	if p.conn == nil {
		return pgx.ErrTxClosed
	}
	if len(p.pending) == 0 {
		return nil
	}
	answers, err := p.flush(ctx, func(*pgx.Batch) {})
	if err != nil {
		return err
	}
	return answers.Close()
}

// CopyFrom implements pgx.Tx.
func (p *pipelined) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string,
	from pgx.CopyFromSource,
) (int64, error) {
	if err := p.sendPending(ctx); err != nil {
		return 0, err
	}
	return p.conn.CopyFrom(ctx, table, columns, from)
}

// LargeObjects implements pgx.Tx. There are none here.
func (p *pipelined) LargeObjects() pgx.LargeObjects { return pgx.LargeObjects{} }

// Prepare implements pgx.Tx.
func (p *pipelined) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	if err := p.sendPending(ctx); err != nil {
		return nil, err
	}
	return p.conn.Conn().Prepare(ctx, name, sql)
}
