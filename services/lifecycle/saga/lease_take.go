package saga

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

func join(lists ...[]any) []any {
	var out []any
	for _, l := range lists {
		out = append(out, l...)
	}
	return out
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

// lease leases up to limit runs that are due, in one transaction: it closes the attempts that their former drivers left
// open as lost, resumes parked attempts and opens the next attempt of the other runs. bad are leased runs that cannot
// be driven.
//
//nolint:nonamedreturns // three values
func (c *Core) lease(ctx context.Context, owner string, length time.Duration, limit int,
	skip []string,
) (out []*leasedRun, bad []*unreadableError, err error) {
	err = pg.InTx(ctx, c.db, func(ctx context.Context, tx pgx.Tx) error {
		out, bad = nil, nil
		var err error
		if out, bad, err = c.leaseRows(ctx, tx, owner, length, limit, skip); err != nil {
			return err
		}
		if err := loseUnreadable(ctx, tx, bad); err != nil || len(out) == 0 {
			return err
		}
		return c.openAttempts(ctx, tx, out)
	})
	if err != nil {
		return nil, nil, err
	}
	if len(out)+len(bad) > 0 {
		c.appended.Notify()
	}
	if len(out) == 0 {
		return nil, bad, nil
	}
	c.stats.Leased.Add(int64(len(out)))
	if c.onPoint != nil {
		for _, h := range out {
			if err := c.onPoint(ctx, "lease.opened", h.place()); err != nil {
				return nil, nil, err
			}
		}
	}
	return out, bad, c.point(ctx, "lease.after_commit", out[0].place())
}

func (c *Core) leaseRows(ctx context.Context, tx pgx.Tx, owner string, length time.Duration, limit int,
	skip []string,
) ([]*leasedRun, []*unreadableError, error) {
	rows, err := pg.Query(ctx, tx, leaseRuns, owner, length.Seconds(), limit, c.registry.keys, append([]string{}, skip...))
	if err != nil {
		return nil, nil, fmt.Errorf("lease runs: %w", err)
	}
	defer rows.Close()
	var out []*leasedRun
	var bad []*unreadableError
	for rows.Next() {
		h := &leasedRun{outputs: map[string]json.RawMessage{}}
		var left float64
		if err := rows.Scan(join(targets(&h.run),
			[]any{&left, &h.paused, &h.former.fence, &h.former.attempt, &h.former.since, &h.outdrawn})...); err != nil {
			return nil, nil, &unreadableError{runID: h.run.ID, err: err}
		}
		h.runLeft, h.overdue = seconds(left), left <= 0
		if h.outdrawn {
			// the open attempt is a row written by the build that drew the numbers; the columns in the run's row are older
			h.former = formerLease{}
		}
		if h.def, err = c.drivable(&h.run); err != nil {
			bad = append(bad, &unreadableError{runID: h.run.ID, err: err, former: h.former})
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
func (c *Core) openAttempts(ctx context.Context, tx pgx.Tx, leased []*leasedRun) error {
	var buffer runs.Buffer
	if err := c.takeOver(ctx, tx, leased, &buffer); err != nil {
		return err
	}
	byID := map[string]*runs.Run{}
	var toOpen, outdrawn []string
	opening := make([]*runs.Run, 0, len(leased))
	for _, h := range leased {
		if h.outdrawn {
			outdrawn = append(outdrawn, h.run.ID)
			h.run.OpSeq = h.run.OpLast
		}
		if h.attempt.RunID == "" && h.run.OpenAttempt == 0 {
			toOpen = append(toOpen, h.run.ID)
		}
		byID[h.run.ID] = &h.run
		opening = append(opening, &h.run)
	}
	if len(outdrawn) > 0 {
		// A build without ranges has driven them meanwhile: the rest of their ranges is below the numbers that it has drawn.
		if err := pg.Queue(ctx, tx, useUpRange, outdrawn); err != nil {
			return fmt.Errorf("use up ranges: %w", err)
		}
	}
	if len(toOpen) > 0 {
		if err := opened(ctx, tx, insertAttempts, toOpen, byID); err != nil {
			return err
		}
	}
	if err := c.drawRanges(ctx, tx, opening); err != nil {
		return err
	}
	for _, h := range leased {
		if h.attempt.RunID == "" {
			h.openIn()
			buffer.Attempt(&h.attempt)
		}
	}
	for _, h := range leased {
		buffer.Run(&h.run)
	}
	if err := buffer.Flush(ctx, tx); err != nil {
		return err
	}
	return c.point(ctx, "lease.before_commit", leased[0].place())
}

// targets returns where Scan puts the columns of a row, in the order of its select list. It is for statements that
// return several rows side by side, whose columns have the same names, and for those of which a part must be read
// though the rest cannot be.
func targets[T any](row *T) []any {
	v := reflect.ValueOf(row).Elem()
	out := make([]any, v.NumField())
	for i := range out {
		out[i] = v.Field(i).Addr().Interface()
	}
	return out
}
