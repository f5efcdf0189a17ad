package events

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/gpuaas/mesh/internal/pg"
)

// applyTries is how often an event is tried before it is parked.
const applyTries = 3

// applyCarefully tries r within savepoints and parks it after the last try. The first result says why it was parked.
//
// both are errors, of the event and of the round
func (c *Consumer) applyCarefully(ctx context.Context, tx pgx.Tx, apply Apply, r Record) (error, error) {
	var poison error
	for range applyTries {
		err := pgx.BeginFunc(ctx, tx, func(sp pgx.Tx) error { return try(ctx, sp, apply, r) })
		if err == nil {
			return nil, nil
		}
		poison = err
		if c.tooSlow(ctx, r.Pos, err) {
			break
		}
		if !Poisonous(ctx, err) {
			return nil, err
		}
	}
	_, err := pg.Exec(ctx, tx, park.For(c.cfg.Schema), c.cfg.Name, r.Pos, r.ID, r.Kind, printable(poison.Error()),
		applyTries)
	if err != nil {
		return nil, fmt.Errorf("park event at %d: %w", r.Pos, err)
	}
	return poison, nil
}

// tooSlow reports whether an event has timed out repeatedly for longer than Patience: then the event is slow, and not
// the database at the moment. An error marked by Later is never the fault of the event, however often it comes again.
func (c *Consumer) tooSlow(ctx context.Context, pos int64, err error) bool {
	if _, later := errors.AsType[*laterError](err); later || !timedOut(ctx, err) {
		return false
	}
	if c.slow.pos != pos || c.slow.since.IsZero() {
		c.slow.pos, c.slow.since = pos, time.Now()
	}
	return time.Since(c.slow.since) > c.cfg.Patience
}

// timedOut reports whether the server cancelled a statement at a timeout, and not the end of ctx.
func timedOut(ctx context.Context, err error) bool {
	var pgErr *pgconn.PgError
	return ctx.Err() == nil && errors.As(err, &pgErr) && pgErr.Code == codeQueryCanceled
}

// mostError bounds the error that is kept with a parked event, in bytes.
const mostError = 4000

// printable returns the beginning of a text, without what Postgres does not store in text.
func printable(s string) string {
	s = s[:min(len(s), mostError)]
	b := make([]rune, 0, len(s))
	for _, r := range s { // bytes that are not UTF-8 become U+FFFD
		if r != 0 {
			b = append(b, r)
		}
	}
	return string(b)
}

// The codes of the timeouts at which the server cancels a statement or a transaction. How long something takes also
// depends on the load and on locks that others hold.
const (
	codeLockNotAvailable  = "55P03"
	codeQueryCanceled     = "57014" // statement_timeout
	codeIdleInTransaction = "25P03"
)

// Poisonous reports whether an error is the fault of the event that was applied, and not of a condition that passes.
func Poisonous(ctx context.Context, err error) bool {
	var later *laterError
	if ctx.Err() != nil || pg.IsConnError(err) || pg.IsRetryable(err) || errors.Is(err, pg.ErrCommitUnknown) ||
		errors.As(err, &later) {
		return false
	}
	var pgErr *pgconn.PgError
	return !errors.As(err, &pgErr) ||
		!slices.Contains([]string{codeLockNotAvailable, codeQueryCanceled, codeIdleInTransaction}, pgErr.Code)
}
