package pg

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Beginner starts transactions: a pool, a connection, or a transaction (then a savepoint).
type Beginner interface {
	Begin(ctx context.Context) (pgx.Tx, error)
}

const (
	txAttempts     = 6
	commitGrace    = 10 * time.Second
	rollbackGrace  = 5 * time.Second
	firstTxBackoff = 2 * time.Millisecond
)

// ErrCommitUnknown is returned if the answer to a COMMIT was lost: the transaction happened wholly or not at all, and
// this process cannot tell which. The caller must read the outcome (by idempotency key or by a compare-and-set that
// names the previous state), or return an error that invites its own caller to repeat the same request. This package
// never retries it.
var ErrCommitUnknown = errors.New("the outcome of the commit is unknown")

// InTx runs fn in a READ COMMITTED transaction and commits it. A serialization failure or a deadlock, in fn or at the
// commit, runs fn again from the start (at most six times, with jitter), so fn must have no effect outside the
// transaction. Any other error of fn rolls back and is returned as it is.
//
// A commit runs to its end even if ctx ends meanwhile: cancelling it would only make its outcome unknown.
func InTx(ctx context.Context, db Beginner, fn func(ctx context.Context, tx pgx.Tx) error) error {
	backoff := firstTxBackoff
	for attempt := 1; ; attempt++ {
		err := once(ctx, db, fn)
		if err == nil || attempt == txAttempts || !IsRetryable(err) || errors.Is(err, ErrCommitUnknown) {
			return err
		}
		timer := time.NewTimer(backoff/2 + rand.N(backoff))
		select {
		case <-ctx.Done():
			timer.Stop()
			return errors.Join(context.Cause(ctx), err)
		case <-timer.C:
		}
		backoff *= 2
	}
}

func once(ctx context.Context, db Beginner, fn func(ctx context.Context, tx pgx.Tx) error) error {
	tx, err := start(ctx, db)
	if err != nil {
		return fmt.Errorf("begin transaction: %w", err)
	}
	ended := false
	defer func() {
		// Also during a panic: a connection must not go back to the pool inside a transaction.
		if !ended {
			rollback(ctx, tx)
		}
	}()
	if err := fn(ctx, tx); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("before commit: %w", context.Cause(ctx))
	}
	if conn := tx.Conn(); conn != nil && conn.IsClosed() {
		return fmt.Errorf("before commit: %w", pgconn.ErrConnClosed)
	}
	commitCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), commitGrace)
	defer cancel()
	err = tx.Commit(commitCtx)
	ended = true
	if err == nil {
		return nil
	}
	if commitIsUnknown(err) {
		return fmt.Errorf("%w: %w", ErrCommitUnknown, err)
	}
	return fmt.Errorf("commit transaction: %w", err)
}

// InSnapshot runs fn in a READ ONLY transaction that sees the database as of its first statement (REPEATABLE READ).
// BEGIN goes with that statement, in one round trip.
func InSnapshot(ctx context.Context, pool *pgxpool.Pool, fn func(ctx context.Context, tx pgx.Tx) error) error {
	tx, err := begin(ctx, pool, "begin isolation level repeatable read read only")
	if err != nil {
		return fmt.Errorf("begin transaction: %w", err)
	}
	ended := false
	defer func() {
		if !ended {
			rollback(ctx, tx)
		}
	}()
	if err := fn(ctx, tx); err != nil {
		return err
	}
	ended = true
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("end transaction: %w", err)
	}
	return nil
}

// start begins a transaction, on a pool without a round trip of its own; see Queue.
func start(ctx context.Context, db Beginner) (pgx.Tx, error) {
	if pool, ok := db.(*pgxpool.Pool); ok {
		return begin(ctx, pool, "begin")
	}
	return db.Begin(ctx)
}

func rollback(ctx context.Context, tx pgx.Tx) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackGrace)
	defer cancel()
	// A failed rollback closes the connection, and that rolls back.
	_ = tx.Rollback(ctx)
}

// commitIsUnknown reports whether a commit got no answer, rather than a refusal. An error response of the server is a
// refusal, except where the backend was torn down: it may have written the commit and been killed before it could say
// so.
//
// pgconn.SafeToRetry is not used: where the answer to a simple query is lost, the driver (5.12) ends up with "conn
// closed", the very error of a connection that was closed before anything was sent, and calls it safe.
func commitIsUnknown(err error) bool {
	if errors.Is(err, pgx.ErrTxCommitRollback) || errors.Is(err, pgx.ErrTxClosed) {
		return false
	}
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.SeverityUnlocalized == "FATAL" || pgErr.SeverityUnlocalized == "PANIC"
	}
	return true
}
