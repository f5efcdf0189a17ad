package project

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/events"
)

// Kinds of events that the projector itself appends, in the transaction of a change of rows that the log does not show
// at the place of an event. Watches of every replica read them; they are not projected. The version of each is a
// position.
const (
	// KindReplayed is of a parked event that was applied, with its position.
	KindReplayed = "projections.replayed"
	// KindRebuilt is of projections that were made again, with the position of the cursor.
	KindRebuilt = "projections.rebuilt"
)

func notifyWatchers(ctx context.Context, tx pgx.Tx, kind string, pos int64) error {
	_, err := events.Append(ctx, tx, events.Event{
		Unnamed: true, Kind: kind, AggregateType: ConsumerName, AggregateID: ConsumerName, AggregateVersion: pos,
	})
	if err != nil {
		return fmt.Errorf("notify watches of what has changed: %w", err)
	}
	return nil
}
