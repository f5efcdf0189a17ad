package events

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// ParkedEvent is an event that its consumer could not apply and passed over.
type ParkedEvent struct {
	Consumer string    `db:"consumer"`
	Pos      int64     `db:"pos"`
	EventID  string    `db:"event_id" expr:"COALESCE(@.event_id::text, '')"`
	Kind     string    `db:"kind"`
	Error    string    `db:"error"`
	Attempts int       `db:"attempts"`
	ParkedAt time.Time `db:"parked_at"`
}

var (
	park = pg.DefineByRole(writers, "events.park", func(schema string) string {
		return `INSERT INTO ` + schema + `.parked_event (consumer, pos, event_id, kind, error, attempts)
			VALUES ($1, $2, NULLIF($3, '')::uuid, $4, $5, $6)
			ON CONFLICT (consumer, pos) DO UPDATE
			SET error = EXCLUDED.error, attempts = parked_event.attempts + EXCLUDED.attempts, parked_at = mesh.clock()`
	})
	listParked = pg.DefineByRole(writers, "events.list_parked", func(schema string) string {
		return `SELECT ` + pg.Columns[ParkedEvent]("p") + ` FROM ` + schema +
			`.parked_event p WHERE p.consumer = $1 ORDER BY p.pos`
	})
	lockParked = pg.DefineByRole(writers, "events.lock_parked", func(schema string) string {
		return `SELECT pos FROM ` + schema + `.parked_event WHERE consumer = $1 AND pos = $2 FOR UPDATE SKIP LOCKED`
	})
	deleteParked = pg.DefineByRole(writers, "events.delete_parked", func(schema string) string {
		return `DELETE FROM ` + schema + `.parked_event WHERE consumer = $1 AND pos = $2`
	})
	parkAgain = pg.DefineByRole(writers, "events.park_again", func(schema string) string {
		return `UPDATE ` + schema + `.parked_event
			SET error = $3, attempts = attempts + 1, parked_at = mesh.clock(), asked_at = NULL
			WHERE consumer = $1 AND pos = $2`
	})
	listAsked = pg.DefineByRole(writers, "events.list_asked", func(schema string) string {
		return `SELECT pos FROM ` + schema + `.parked_event
			WHERE consumer = $1 AND asked_at IS NOT NULL ORDER BY pos LIMIT $2`
	})
)

// replayTogether and replayFor bound what is applied again between two batches: others wait for the next batch.
const (
	replayTogether = 20
	replayFor      = time.Second
)

var errInOrder = errors.New("this consumer applies events in their order alone, and has applied later ones: the " +
	"event can only be dropped")

// replayAsked applies again some of those parked events of which a person has asked it, in their order, and reports
// whether any was tried. One that cannot be applied this time either stays parked, and is not asked for any more.
func (c *Consumer) replayAsked(ctx context.Context, apply Apply) (bool, error) {
	if c.cfg.InOrder {
		apply = func(context.Context, pgx.Tx, Record) error { return errInOrder }
	}
	list, err := pg.Values[int64](ctx, c.deps.Pool, listAsked.For(c.cfg.Schema), c.cfg.Name, replayTogether)
	if err != nil {
		return false, fmt.Errorf("list events to apply again: %w", err)
	}
	tried := false
	for began := time.Now(); len(list) > 0 && time.Since(began) < replayFor; list = list[1:] {
		err := c.Replay(ctx, list[0], apply)
		switch {
		case errors.Is(err, ErrNotParked): // another replica applies it, or it was dropped
			continue
		case err != nil && !Poisonous(ctx, err) && !timedOut(ctx, err):
			return tried, err
		case err != nil:
			c.deps.Logger.WarnContext(ctx, "parked event cannot be applied again", slog.String("consumer", c.cfg.Name),
				slog.Int64("pos", list[0]), slog.Any("error", err))
		default:
			c.deps.Logger.InfoContext(ctx, "parked event applied", slog.String("consumer", c.cfg.Name),
				slog.Int64("pos", list[0]))
		}
		tried = true
	}
	return tried, nil
}

// Parked lists what this consumer parked, oldest first.
func (c *Consumer) Parked(ctx context.Context) ([]ParkedEvent, error) {
	list, err := pg.All[ParkedEvent](ctx, c.deps.Pool, listParked.For(c.cfg.Schema), c.cfg.Name)
	if err != nil {
		return nil, fmt.Errorf("list parked events: %w", err)
	}
	return list, nil
}

// ErrNotParked is returned if there is no parked event at the position, or if another transaction replays it now.
var ErrNotParked = errors.New("no parked event at this position")

// Replay applies one parked event and takes it off the list in the same transaction. A failure leaves it parked, with
// the new error and one more attempt.
func (c *Consumer) Replay(ctx context.Context, pos int64, apply Apply) error {
	var record Record
	err := pg.InTx(ctx, c.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		_, err := pg.Value[int64](ctx, tx, lockParked.For(c.cfg.Schema), c.cfg.Name, pos)
		if pg.IsNoRows(err) {
			return ErrNotParked
		}
		if err != nil {
			return err
		}
		if record, err = At(ctx, tx, pos); err != nil {
			return err
		}
		if err := try(ctx, tx, apply, record); err != nil {
			return err
		}
		if c.deps.Replayed != nil {
			if err := c.deps.Replayed(ctx, tx, record); err != nil {
				return err
			}
		}
		_, err = pg.Exec(ctx, tx, deleteParked.For(c.cfg.Schema), c.cfg.Name, pos)
		return err
	})
	if err == nil {
		if c.deps.Committed != nil {
			c.deps.Committed([]Record{record})
		}
		return nil
	}
	err = fmt.Errorf("replay event at %d: %w", pos, err)
	if errors.Is(err, ErrNotParked) || !Poisonous(ctx, err) && !timedOut(ctx, err) {
		return err
	}
	_, uerr := pg.Exec(ctx, c.deps.Pool, parkAgain.For(c.cfg.Schema), c.cfg.Name, pos, printable(err.Error()))
	return errors.Join(err, uerr)
}
