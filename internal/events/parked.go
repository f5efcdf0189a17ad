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
			WHERE consumer = $1 AND asked_at IS NOT NULL AND pos > $2 ORDER BY pos LIMIT $3`
	})
)

// askedTogether is how many of the parked events that are to be applied again are listed at once.
const askedTogether = 100

// replayAsked applies again those parked events of which a person has asked it, in their order. One that cannot be
// applied this time either stays parked, and is not asked for any more.
func (c *Consumer) replayAsked(ctx context.Context, apply Apply) error {
	for after := int64(0); ; {
		list, err := pg.Values[int64](ctx, c.deps.Pool, listAsked.For(c.cfg.Schema), c.cfg.Name, after, askedTogether)
		if err != nil || len(list) == 0 {
			return err
		}
		for _, pos := range list {
			after = pos
			err := c.Replay(ctx, pos, apply)
			switch {
			case errors.Is(err, ErrNotParked): // another replica applies it, or it was dropped
			case err != nil && !Poisonous(ctx, err) && !timedOut(ctx, err):
				return err
			case err != nil:
				c.deps.Logger.WarnContext(ctx, "parked event cannot be applied again", slog.String("consumer", c.cfg.Name),
					slog.Int64("pos", pos), slog.Any("error", err))
			default:
				c.deps.Logger.InfoContext(ctx, "parked event applied", slog.String("consumer", c.cfg.Name),
					slog.Int64("pos", pos))
			}
		}
	}
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
