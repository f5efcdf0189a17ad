package pg

import (
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// answeredRows ends the pipeline with the rows.
type answeredRows struct {
	pgx.Rows
	answers pgx.BatchResults
	err     error
	closed  bool
}

func (r *answeredRows) Next() bool {
	if r.Rows.Next() {
		return true
	}
	r.Close()
	return false
}

func (r *answeredRows) Close() {
	r.Rows.Close()
	if !r.closed {
		r.closed = true
		r.err = r.answers.Close()
	}
}

func (r *answeredRows) Err() error {
	if err := r.Rows.Err(); err != nil {
		return err
	}
	return r.err
}

// oneRow scans the first row, as pgx's own does.
type oneRow struct {
	rows pgx.Rows
	err  error
}

// Scan implements pgx.Row.
func (r oneRow) Scan(dest ...any) error {
	if r.err != nil {
		return r.err
	}
	defer r.rows.Close()
	if !r.rows.Next() {
		if err := r.rows.Err(); err != nil {
			return err
		}
		return pgx.ErrNoRows
	}
	if err := r.rows.Scan(dest...); err != nil {
		return err
	}
	r.rows.Close()
	return r.rows.Err()
}

// failedRows are the rows of a query that was not made.
type failedRows struct {
	pgx.Rows
	err error
}

// Close implements pgx.Rows.
func (failedRows) Close() {}

// Err implements pgx.Rows.
func (r failedRows) Err() error { return r.err }

// Next implements pgx.Rows.
func (failedRows) Next() bool { return false }

// Scan implements pgx.Rows.
func (r failedRows) Scan(...any) error { return r.err }

// failedBatch is the answer to a batch that was not sent.
type failedBatch struct {
	pgx.BatchResults
	err error
}

// Exec implements pgx.BatchResults.
func (b failedBatch) Exec() (pgconn.CommandTag, error) { return pgconn.CommandTag{}, b.err }

// Query implements pgx.BatchResults.
func (b failedBatch) Query() (pgx.Rows, error) { return failedRows{err: b.err}, b.err }

// QueryRow implements pgx.BatchResults.
func (b failedBatch) QueryRow() pgx.Row { return oneRow{err: b.err} }

// Close implements pgx.BatchResults.
func (b failedBatch) Close() error { return b.err }
