package events

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// Listen makes Listening of a signal true, as a connection does, until the returned function is called.
func Listen(s *Signal) func() { return s.listen() }

// SequencerLock is the lock of the session that numbers.
const SequencerLock = int64(sequencerLock)

// TypeOfKind is the table of messages by the kind of their events.
var TypeOfKind = typeOfKind

// Stored returns the body of an event as Append stores it, and the name of its message.
func Stored(e Event) ([]byte, string, error) {
	c, err := e.content()
	if err != nil {
		return nil, "", err
	}
	return c.body, *c.bodyType, nil
}

// Paced counts the rounds of a sequencer until ctx ends.
func Paced(ctx context.Context, wake *Signal) int {
	cfg := sequencerDefaults
	for n := 1; ; n++ {
		woken, urged := wake.C(), wake.urgent()
		if !cfg.waitForWork(ctx, time.Now(), cfg.Poll, woken, urged) {
			return n
		}
	}
}

// Unnumbered returns how many events wait for their number, as the lag of a consumer of schema has it.
func Unnumbered(ctx context.Context, tx pgx.Tx, schema, consumer string) (int64, error) {
	var l Lag
	var oldest float64
	rows, err := pg.Query(ctx, tx, measureLag.For(schema), consumer)
	if err != nil {
		return 0, err
	}
	_, err = pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (int64, error) {
		return 0, row.Scan(&l.Cursor, &l.Horizon, &l.Events, &l.Unnumbered, &oldest, &l.Parked)
	})
	return l.Unnumbered, err
}
