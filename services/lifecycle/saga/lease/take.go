package lease

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// leasedRow is a run that was leased, with what its former driver left. The names of the columns are those of the
// lease's select list.
type leasedRow struct {
	runs.Run

	SecondsLeft   float64    `db:"seconds_left"` // of the run's deadline
	Paused        bool       `db:"paused"`
	FormerFence   int64      `db:"former_fence"`
	FormerAttempt int        `db:"former_attempt"`
	FormerSince   *time.Time `db:"former_since"`
	RangePassed   bool       `db:"range_passed"`
}

// leased returns the run as it is driven from now on.
func (r *leasedRow) leased() *Run {
	h := &Run{
		Run: r.Run, Outputs: map[string]json.RawMessage{}, Paused: r.Paused, Overdue: r.SecondsLeft <= 0,
		RunLeft: time.Duration(r.SecondsLeft * float64(time.Second)), rangePassed: r.RangePassed,
	}
	// If the range was passed, the open attempt is a row that was written by the build which drew the numbers; the columns
	// in the run's row are older.
	if !r.RangePassed {
		h.former = formerLease{fence: r.FormerFence, attempt: r.FormerAttempt, since: r.FormerSince}
	}
	return h
}

// unreadableError names a leased run that this build cannot drive.
type unreadableError struct {
	runID  string
	err    error
	former formerLease
}

func (e *unreadableError) Error() string {
	return "run " + e.runID + " is unreadable: " + e.err.Error()
}

func (e *unreadableError) Unwrap() error { return e.err }

// leaseRows leases up to limit runs that are due and pairs each with its definition. The second list are leased runs
// that this build cannot drive. A run of a version, kind or phase that this build does not know is left to one that
// does.
func (k *Keeper) leaseRows(ctx context.Context, tx pgx.Tx, limit int, skip []string,
) ([]*Run, []*unreadableError, error) {
	rows, err := pg.Query(ctx, tx, leaseRuns, k.terms.Owner, k.terms.Length.Seconds(), limit, k.core.Registry().Keys(),
		append([]string{}, skip...), names.Spellings[commonv1.OperationKind](), names.Spellings[commonv1.Direction]())
	if err != nil {
		return nil, nil, fmt.Errorf("lease runs: %w", err)
	}
	defer rows.Close()
	var out []*Run
	var bad []*unreadableError
	for rows.Next() {
		// Of a row that cannot be read the columns before the one at fault are set, and the id is the first.
		row, err := pgx.RowToStructByName[leasedRow](rows)
		if err != nil {
			return nil, nil, &unreadableError{runID: row.ID, err: err}
		}
		h := row.leased()
		if h.Def, err = k.core.Drivable(&h.Run); err != nil {
			bad = append(bad, &unreadableError{runID: h.Run.ID, err: err, former: h.former})
			continue
		}
		out = append(out, h)
	}
	if err := rows.Err(); err != nil {
		return nil, nil, fmt.Errorf("lease runs: %w", err)
	}
	return out, bad, nil
}

// formerLease is the attempt that the previous lease of a run left open in the run's row.
type formerLease struct {
	fence   int64
	attempt int // 0: nothing
	since   *time.Time
}

// openAttempts gives every leased run its open attempt. It runs in statements after the lease, so that they see what
// the former drivers committed before the lease got their rows' locks.
func (k *Keeper) openAttempts(ctx context.Context, tx pgx.Tx, leased []*Run) error {
	var buffer runs.Buffer
	if err := k.takeOver(ctx, tx, leased, &buffer); err != nil {
		return err
	}
	byID := map[string]*runs.Run{}
	var toOpen, passed []string
	opening := make([]*runs.Run, 0, len(leased))
	for _, h := range leased {
		if h.rangePassed {
			passed = append(passed, h.Run.ID)
			h.Run.OpSeq = h.Run.OpLast
		}
		if h.Attempt.RunID == "" && h.Run.OpenAttempt == 0 {
			toOpen = append(toOpen, h.Run.ID)
		}
		byID[h.Run.ID] = &h.Run
		opening = append(opening, &h.Run)
	}
	if len(passed) > 0 {
		// A build without ranges has driven them meanwhile: the rest of their ranges is below the numbers that it has drawn.
		if err := pg.Queue(ctx, tx, useUpRange, passed); err != nil {
			return fmt.Errorf("use up ranges: %w", err)
		}
	}
	if len(toOpen) > 0 {
		if err := opened(ctx, tx, insertAttempts, toOpen, byID); err != nil {
			return err
		}
	}
	if err := takeStages(ctx, tx, leased); err != nil {
		return err
	}
	if err := DrawRanges(ctx, tx, opening); err != nil {
		return err
	}
	for _, h := range leased {
		if h.Attempt.RunID == "" {
			h.Attempt = h.Def.Open(&h.Run)
			buffer.Attempt(&h.Attempt)
		}
	}
	for _, h := range leased {
		buffer.Run(&h.Run)
	}
	if err := buffer.Flush(ctx, tx); err != nil {
		return err
	}
	return k.core.Point(ctx, "lease.before_commit", leased[0].Place())
}
