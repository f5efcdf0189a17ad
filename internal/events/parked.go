package events

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// ParkedEvent is an event that its consumer could not apply and passed over.
type ParkedEvent struct {
	Consumer string
	Pos      int64
	EventID  string
	Kind     string
	Error    string
	Attempts int
	ParkedAt time.Time
}

// Parked lists what this consumer parked, oldest first.
func (c *Consumer) Parked(ctx context.Context) ([]ParkedEvent, error) {
	rows, err := c.deps.Pool.Query(ctx, "SELECT consumer, pos, event_id::text, kind, error, attempts, parked_at FROM "+c.parked+
		" WHERE consumer = $1 ORDER BY pos", c.cfg.Name)
	if err != nil {
		return nil, fmt.Errorf("list parked events: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[ParkedEvent])
	if err != nil {
		return nil, fmt.Errorf("list parked events: %w", err)
	}
	return list, nil
}

// ErrNotParked says that there is no parked event at the position, or that somebody else replays it now.
var ErrNotParked = errors.New("no parked event at this position")

// Replay applies one parked event and takes it off the list in the same transaction. A failure leaves it parked, with
// the new error and one more attempt.
func (c *Consumer) Replay(ctx context.Context, pos int64, apply Apply) error {
	var record Record
	err := pg.InTx(ctx, c.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		var found int64
		err := tx.QueryRow(ctx, "SELECT pos FROM "+c.parked+" WHERE consumer = $1 AND pos = $2 FOR UPDATE SKIP LOCKED",
			c.cfg.Name, pos).Scan(&found)
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
		_, err = tx.Exec(ctx, "DELETE FROM "+c.parked+" WHERE consumer = $1 AND pos = $2", c.cfg.Name, pos)
		return err
	})
	if err == nil {
		if c.deps.Committed != nil {
			c.deps.Committed([]Record{record})
		}
		return nil
	}
	err = fmt.Errorf("replay event at %d: %w", pos, err)
	if errors.Is(err, ErrNotParked) || !poisonous(ctx, err) {
		return err
	}
	_, uerr := c.deps.Pool.Exec(ctx, "UPDATE "+c.parked+` SET error = $3, attempts = attempts + 1, parked_at = mesh.clock()
		WHERE consumer = $1 AND pos = $2`, c.cfg.Name, pos, printable(err.Error()))
	return errors.Join(err, uerr)
}
