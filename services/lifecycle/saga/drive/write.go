package drive

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/lease"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// transition is one write of a driver: the open attempt closes, and either another opens (attempt) or the lease is
// given up (release).
type transition struct {
	h       *lease.Run
	cl      closing
	attempt *nextAttempt
	release *release

	to     lease.Run // after an advance
	runNow runs.Run  // after a release
	err    error
	done   chan struct{}
}

func (mv *transition) rows() saga.Writes {
	if mv.attempt != nil {
		return mv.attempt.rows
	}
	return mv.release.rows
}

func (mv *transition) passOver() bool {
	return (mv.attempt != nil && mv.attempt.passOver) || (mv.release != nil && mv.release.passOver)
}

func (mv *transition) point() string {
	if mv.attempt != nil {
		return "advance"
	}
	return mv.release.point
}

// write writes transitions of different runs in one transaction, with their events, and sets err of each that missed
// its compare-and-set. If write returns an error, all of them were rolled back.
func (d *Driver) write(ctx context.Context, moves []*transition) error {
	slices.SortFunc(moves, func(a, b *transition) int { return strings.Compare(a.h.Run.ID, b.h.Run.ID) })
	err := pg.InTx(ctx, d.core.DB(), func(ctx context.Context, tx pgx.Tx) error {
		var advances, releases []*transition
		for _, mv := range moves {
			mv.err = nil
			if err := d.stepRows(ctx, tx, mv.h, mv.rows()); err != nil {
				return err
			}
			if mv.attempt != nil {
				advances = append(advances, mv)
			} else {
				releases = append(releases, mv)
			}
		}
		if len(advances) > 0 && len(releases) > 0 {
			// Two statements follow, each of which locks its runs and then their workspaces. Lock all runs first, to keep the
			// order of locks.
			runIDs := make([]string, len(moves))
			for i, mv := range moves {
				runIDs[i] = mv.h.Run.ID
			}
			if err := lease.LockRuns(ctx, tx, runIDs...); err != nil {
				return err
			}
		}
		var buffer runs.Buffer
		if err := d.advanceAll(ctx, tx, advances, &buffer); err != nil {
			return err
		}
		if err := d.releaseRuns(ctx, tx, releases, &buffer); err != nil {
			return err
		}
		for _, mv := range moves {
			if mv.err != nil && !mv.rows().Empty() {
				return errRowsOfMiss
			}
		}
		if err := buffer.Flush(ctx, tx); err != nil {
			return err
		}
		for _, mv := range moves {
			if mv.err != nil {
				continue
			}
			if err := d.core.Point(ctx, mv.point()+".before_commit", mv.h.Place()); err != nil {
				return err
			}
		}
		return nil
	})
	switch {
	case errors.Is(err, errRowsOfMiss) && len(moves) == 1:
		return nil // everything was rolled back, and the transition's err says why it missed
	case errors.Is(err, errRowsOfMiss):
		for _, mv := range moves {
			if err := d.write(ctx, []*transition{mv}); err != nil {
				return err
			}
		}
		return nil
	case err == nil:
		d.core.Appended().Notify()
	}
	return err
}

// errRowsOfMiss rolls the transaction back: a step whose end was not written (it was cancelled meanwhile, or its driver
// fenced out) must leave none of its own rows.
var errRowsOfMiss = errors.New("the step's end was not taken")

// stepRows writes a step's own rows under the lease. The run and then its workspace are locked before the rows are
// written.
func (d *Driver) stepRows(ctx context.Context, tx pgx.Tx, h *lease.Run, w saga.Writes) error {
	if w.Empty() {
		return nil
	}
	for _, lock := range w.Before {
		if err := lock(ctx, tx); err != nil {
			return &rowsError{err: err}
		}
	}
	fence, err := pg.Value[int64](ctx, tx, lockForRows, h.Run.ID)
	if err != nil {
		return fmt.Errorf("hold run: %w", err)
	}
	if fence != h.Run.Fence {
		return saga.ErrFenced
	}
	for _, fn := range w.Rows {
		if fn == nil {
			continue
		}
		if err := fn(ctx, tx); err != nil {
			return &rowsError{err: err}
		}
	}
	return nil
}

// rowsError marks a failure of a step's own rows: the step failed, not the core.
type rowsError struct{ err error }

func (e *rowsError) Error() string { return "write rows of step: " + e.err.Error() }

func (e *rowsError) Unwrap() error { return e.err }
