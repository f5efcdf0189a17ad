package events

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
)

// Seen is an event about something whose versions no row of the database counts, and that several replicas may report.
// Its version is the time of the append by the database's clock, less Ago, in microseconds: the clocks of replicas do
// not come into it.
type Seen struct {
	Event
	// Ago is how much earlier it was seen.
	Ago time.Duration
}

// AppendSeen is Append for events whose versions are taken from the database's clock.
func AppendSeen(ctx context.Context, tx pgx.Tx, seen ...Seen) (string, error) {
	if len(seen) == 0 {
		return "", errors.New("append events: none given")
	}
	evs, contents := make([]Event, len(seen)), make([]content, len(seen))
	for i, s := range seen {
		evs[i] = s.Event
		if s.ID == "" {
			evs[i].ID = ids.New()
		}
		evs[i].AggregateVersion = s.Ago.Microseconds() // the statement subtracts it from the time
		var err error
		if contents[i], err = s.content(); err != nil {
			return "", fmt.Errorf("append event %s: %w", s.Kind, err)
		}
	}
	if err := pg.Queue(ctx, tx, appendSeen, columns(evs, contents)...); err != nil {
		return "", fmt.Errorf("append events: %w", err)
	}
	note(ctx)
	return evs[len(evs)-1].ID, nil
}
