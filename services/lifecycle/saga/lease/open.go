package lease

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// openedRow has the columns of a run's row that describe its open attempt.
type openedRow struct {
	ID          string     `db:"id"`
	OpSeq       int64      `db:"op_seq"`
	OpLast      int64      `db:"op_last"`
	OpenAttempt int        `db:"open_attempt"`
	OpenSince   *time.Time `db:"open_since"`
}

// DrawRanges draws a new range of operation numbers for each run whose newest attempt has a number beyond the end of
// its range: the range is used up, or the database's era was raised since it was drawn.
func DrawRanges(ctx context.Context, tx pgx.Tx, opening []*runs.Run) error {
	byID := map[string]*runs.Run{}
	var beyond []string
	for _, r := range opening {
		if r.OpSeq > r.OpLast {
			byID[r.ID] = r
			beyond = append(beyond, r.ID)
		}
	}
	if len(beyond) == 0 {
		return nil
	}
	return opened(ctx, tx, drawRange, beyond, byID)
}

// opened runs a statement that opens attempts in the rows of runs, and copies the returned columns into byID.
func opened(ctx context.Context, tx pgx.Tx, change *pg.Statement, runIDs []string, byID map[string]*runs.Run) error {
	rows, err := pg.All[openedRow](ctx, tx, change, runIDs)
	if err != nil {
		return fmt.Errorf("open attempts: %w", err)
	}
	if len(rows) != len(runIDs) {
		return fmt.Errorf("open attempts: %d of %d", len(rows), len(runIDs))
	}
	for _, row := range rows {
		r := byID[row.ID]
		r.OpSeq, r.OpLast, r.OpenAttempt, r.OpenSince = row.OpSeq, row.OpLast, row.OpenAttempt, row.OpenSince
	}
	return nil
}
