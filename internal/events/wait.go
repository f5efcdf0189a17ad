package events

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
)

// MaxWait is the longest that WaitFor waits.
const MaxWait = 2 * time.Second

var (
	// ErrBehind says that the consumer has not reached the event in time; a read would be stale.
	ErrBehind = errors.New("the projection has not reached this position yet")
	// ErrUnknownPosition says that no event has this id: the token is not one of ours.
	ErrUnknownPosition = errors.New("unknown position token")
)

// WaitFor returns once the event is numbered and this consumer's cursor, on whichever replica, has passed it. It waits
// at most MaxWait, less if ctx ends sooner. The token is an event's id, as Append returned it; empty waits for nothing.
func (c *Consumer) WaitFor(ctx context.Context, token string) error {
	if token == "" {
		return nil
	}
	if !ids.Valid(token) {
		return ErrUnknownPosition
	}
	ctx, cancel := context.WithTimeout(ctx, MaxWait)
	defer cancel()
	// Signals of this process come at once; another replica's progress shows only in the table.
	const tick = 10 * time.Millisecond
	for {
		numbered, advanced := c.deps.Numbered.C(), c.advanced.C()
		pos, cursor, err := c.positions(ctx, token)
		switch {
		case err == nil && pos > 0 && cursor >= pos:
			return nil
		case errors.Is(err, ErrUnknownPosition):
			return err
		case ctx.Err() == nil && err != nil:
			return fmt.Errorf("wait for position: %w", err)
		}
		if err == nil && pos == 0 {
			c.deps.Wake.Notify()
			advanced = numbered
		}
		timer := time.NewTimer(tick)
		select {
		case <-ctx.Done():
			timer.Stop()
			return fmt.Errorf("%w: %w", ErrBehind, ctx.Err())
		case <-advanced:
			timer.Stop()
		case <-timer.C:
		}
	}
}

// positions reads the event's position (zero if not numbered yet) and the cursor's (zero if there is none yet).
func (c *Consumer) positions(ctx context.Context, token string) (int64, int64, error) {
	var pos, cursor int64
	err := c.deps.Pool.QueryRow(ctx, `SELECT COALESCE(pos, 0), COALESCE((SELECT pos FROM `+c.cursor+` WHERE name = $2), 0)
		FROM events.event WHERE id = $1::uuid`, token, c.cfg.Name).Scan(&pos, &cursor)
	if pg.IsNoRows(err) {
		return 0, 0, ErrUnknownPosition
	}
	return pos, cursor, err
}

// Lag is how far a consumer is behind.
type Lag struct {
	// Cursor and Horizon are positions; Events between them wait to be applied (other kinds included).
	Cursor, Horizon, Events int64
	// Unnumbered events wait for a sequencer; Oldest is the age of the oldest event that is not applied.
	Unnumbered int64
	Oldest     time.Duration
	// Parked events were passed over.
	Parked int64
}

// Lag measures, for readiness, metrics and status.
func (c *Consumer) Lag(ctx context.Context) (Lag, error) {
	var l Lag
	var oldest float64
	err := c.deps.Pool.QueryRow(ctx, `
		WITH cur AS (SELECT COALESCE((SELECT pos FROM `+c.cursor+` WHERE name = $1), 0) AS pos)
		SELECT cur.pos, COALESCE((SELECT max(pos) FROM events.event), 0),
			(SELECT count(*) FROM events.event e WHERE e.pos > cur.pos),
			(SELECT count(*) FROM events.event e WHERE e.pos IS NULL),
			COALESCE(EXTRACT(EPOCH FROM mesh.clock() - LEAST(
				(SELECT e.created_at FROM events.event e WHERE e.pos > cur.pos ORDER BY e.pos LIMIT 1),
				(SELECT min(e.created_at) FROM events.event e WHERE e.pos IS NULL))), 0)::float8,
			(SELECT count(*) FROM `+c.parked+` p WHERE p.consumer = $1)
		FROM cur`, c.cfg.Name).Scan(&l.Cursor, &l.Horizon, &l.Events, &l.Unnumbered, &oldest, &l.Parked)
	if err != nil {
		return Lag{}, fmt.Errorf("measure lag of %s: %w", c.cfg.Name, err)
	}
	l.Oldest = time.Duration(oldest * float64(time.Second))
	return l, nil
}
