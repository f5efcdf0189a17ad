package events

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// Apply applies one event within tx. It may be called again for the same event after a rollback and, out of order, at a
// replay, so it changes nothing except through tx, and it compares the event's AggregateVersion with the version that
// it has.
type Apply func(ctx context.Context, tx pgx.Tx, r Record) error

// Later marks an error of Apply as not caused by the event: the consumer stops at the event, waits and tries again,
// instead of parking it. Errors of the connection and of concurrency are treated so without the mark.
func Later(err error) error {
	if err == nil {
		return nil
	}
	return &laterError{err: err}
}

type laterError struct{ err error }

func (e *laterError) Error() string { return e.err.Error() }

func (e *laterError) Unwrap() error { return e.err }

// try calls apply and turns a panic into an error: an event that makes the code panic is poison, not an outage.
func try(ctx context.Context, tx pgx.Tx, apply Apply, r Record) (err error) { // set by recover
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("apply panicked: %v", p)
		}
	}()
	return apply(ctx, tx, r)
}

// tryTogether is try for a batch.
func tryTogether(ctx context.Context, tx pgx.Tx, together func(context.Context, pgx.Tx, []Record) error,
	records []Record,
) error {
	return try(ctx, tx, func(ctx context.Context, tx pgx.Tx, _ Record) error { return together(ctx, tx, records) },
		Record{})
}
