package runs

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// Lost collects attempts that were open in the rows of runs when these were leased again.
type Lost struct {
	runIDs   []string
	attempts []int32
	fences   []int64
	since    []*time.Time
}

// Add adds the attempt of a run's former lease. It has a row of its own, or there is none, if its number is 0.
func (l *Lost) Add(runID string, attempt int, fence int64, since *time.Time) {
	if attempt == 0 {
		return
	}
	l.runIDs, l.attempts = append(l.runIDs, runID), append(l.attempts, int32(attempt)) // small counts
	l.fences, l.since = append(l.fences, fence), append(l.since, since)
}

// Close closes the collected attempts as lost, by inserting their rows, and returns these.
func (l *Lost) Close(ctx context.Context, tx pgx.Tx) ([]Attempt, error) {
	if len(l.runIDs) == 0 {
		return nil, nil
	}
	return ChangeAttempts(ctx, tx, loseOpen, l.runIDs, l.attempts, l.fences, l.since)
}
