package saga

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
)

// leasedRun is a run that this process drives: its row and its open attempt as of the last transaction.
type leasedRun struct {
	run      Run
	attempt  Attempt
	def      *Definition
	outputs  map[string]json.RawMessage
	overdue  bool // the run is past its deadline
	paused   bool // rollback mode was set at the last transaction
	former   formerLease
	outdrawn bool // numbers of the workspace were drawn since the run was given its range
	// runLeft is how much of the run's deadline was left at the last transaction.
	runLeft time.Duration
}

func (h *leasedRun) step() *Step { return &h.def.Steps[h.run.Step] }

func (h *leasedRun) place() Place {
	return Place{RunID: h.run.ID, Step: h.run.Step, Direction: h.run.Phase}
}

// closing is how the open attempt ends.
type closing struct {
	state  string
	why    string
	err    *StepError
	output json.RawMessage
}

func (cl closing) code() (string, string, string) {
	if cl.err == nil {
		return "", "", ""
	}
	return names.Of(cl.err.Reason), cl.err.Public, layerName(cl.err)
}

func layerName(e *StepError) string {
	if e.Layer == 0 {
		return ""
	}
	return names.Of(e.Layer)
}

// nextAttempt is the attempt that an advance opens.
type nextAttempt struct {
	step      int
	phase     string
	bumpFence bool
	passOver  bool // a pending cancel does not stop this transition
	keepError bool // write the closing's error to the run
	rows      writes
}

// rest is how a run leaves its driver: parked, ended or stuck.
type rest struct {
	state     string
	attempts  int
	after     time.Duration
	wakeable  bool
	why       string
	stuck     string
	passOver  bool
	keepError bool
	workspace string // new state of the workspace; empty leaves it
	rows      writes
	point     string // park or finish
}

// transition is one write of a driver: the open attempt closes, and either the next one opens (next) or the lease is
// given up (rest).
type transition struct {
	h    *leasedRun
	cl   closing
	next *nextAttempt
	rest *rest

	to     leasedRun // after an advance
	runNow Run       // after a release
	err    error
	done   chan struct{}
}

func (mv *transition) rows() writes {
	if mv.next != nil {
		return mv.next.rows
	}
	return mv.rest.rows
}

func (mv *transition) passOver() bool {
	return (mv.next != nil && mv.next.passOver) || (mv.rest != nil && mv.rest.passOver)
}

func (mv *transition) point() string {
	if mv.next != nil {
		return "advance"
	}
	return mv.rest.point
}

// write writes transitions of different runs in one transaction, with their events, and sets err of each that missed
// its compare-and-set. If write returns an error, all of them were rolled back.
func (c *Core) write(ctx context.Context, moves []*transition) error {
	slices.SortFunc(moves, func(a, b *transition) int { return strings.Compare(a.h.run.ID, b.h.run.ID) })
	err := pg.InTx(ctx, c.db, func(ctx context.Context, tx pgx.Tx) error {
		var advances, releases []*transition
		for _, mv := range moves {
			mv.err = nil
			if err := c.stepRows(ctx, tx, mv.h, mv.rows()); err != nil {
				return err
			}
			if mv.next != nil {
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
				runIDs[i] = mv.h.run.ID
			}
			if err := pg.Queue(ctx, tx, lockRuns, runIDs); err != nil {
				return fmt.Errorf("lock runs: %w", err)
			}
		}
		var j eventBuffer
		if err := c.advanceAll(ctx, tx, advances, &j); err != nil {
			return err
		}
		if err := c.releaseRuns(ctx, tx, releases, &j); err != nil {
			return err
		}
		for _, mv := range moves {
			if mv.err != nil && !mv.rows().empty() {
				return errRowsOfMiss
			}
		}
		if err := j.flush(ctx, tx); err != nil {
			return err
		}
		for _, mv := range moves {
			if mv.err != nil {
				continue
			}
			if err := c.point(ctx, mv.point()+".before_commit", mv.h.place()); err != nil {
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
			if err := c.write(ctx, []*transition{mv}); err != nil {
				return err
			}
		}
		return nil
	case err == nil:
		c.appended.Notify()
	}
	return err
}

// errRowsOfMiss rolls the transaction back: a step whose end was not written (it was cancelled meanwhile, or its driver
// fenced out) must leave none of its own rows.
var errRowsOfMiss = errors.New("the step's end was not taken")

// stepRows writes a step's own rows under the lease. The run and then its workspace are locked before the rows are
// written.
func (c *Core) stepRows(ctx context.Context, tx pgx.Tx, h *leasedRun, w writes) error {
	if w.empty() {
		return nil
	}
	for _, lock := range w.before {
		if err := lock(ctx, tx); err != nil {
			return &rowsError{err: err}
		}
	}
	fence, err := pg.Value[int64](ctx, tx, lockForRows, h.run.ID)
	if err != nil {
		return fmt.Errorf("hold run: %w", err)
	}
	if fence != h.run.Fence {
		return ErrFenced
	}
	for _, fn := range w.rows {
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

// touchWorkspaces sets the state of the workspaces of runs whose leases were given up.
func (c *Core) touchWorkspaces(ctx context.Context, tx pgx.Tx, moves []*transition, j *eventBuffer) error {
	var workspaces, runs, states, codes, errs []string
	for _, mv := range moves {
		if mv.err != nil || mv.rest.workspace == "" {
			continue
		}
		code, text := mv.runNow.ErrorCode, mv.runNow.Error
		if mv.rest.stuck != "" {
			code, text = "undo_exhausted", mv.rest.stuck
		}
		workspaces, runs = append(workspaces, mv.runNow.WorkspaceID), append(runs, mv.runNow.ID)
		states, codes, errs = append(states, mv.rest.workspace), append(codes, code), append(errs, text)
	}
	if len(workspaces) == 0 {
		return nil
	}
	return touch(ctx, tx, j, workspaces, runs, states, codes, errs)
}

// touchWorkspace changes one workspace's state and last error beside its run.
func (c *Core) touchWorkspace(ctx context.Context, tx pgx.Tx, run *Run, j *eventBuffer, state, code,
	text string,
) error {
	return touch(ctx, tx, j, []string{run.WorkspaceID}, []string{run.ID}, []string{state}, []string{code}, []string{text})
}

func touch(ctx context.Context, tx pgx.Tx, j *eventBuffer, workspaces, runs, states, codes, errs []string) error {
	changed, err := pg.All[Workspace](ctx, tx, touchWorkspacesOf, workspaces, runs, states, codes, errs)
	if err != nil {
		return fmt.Errorf("change workspaces: %w", err)
	}
	if len(changed) != len(workspaces) {
		return fmt.Errorf("change workspaces: %d of %d belong to their runs", len(changed), len(workspaces))
	}
	for i := range changed {
		if err := j.workspace(&changed[i]); err != nil {
			return err
		}
	}
	return nil
}

// undoFrom returns the step at which a compensation of h begins: the last one that may have left a resource, which is
// the present step or a later one with a claim adopted from an earlier run. -1 means that nothing is to be undone.
func (c *Core) undoFrom(ctx context.Context, h *leasedRun) (int, error) {
	from := h.run.Step
	held, err := claims.Live(ctx, c.db, h.run.WorkspaceID)
	if err != nil {
		return 0, err
	}
	live := map[string]bool{}
	for i := range held {
		live[held[i].Kind] = true
	}
	for i := len(h.def.Steps) - 1; i > from; i-- {
		for _, kind := range h.def.Steps[i].Kinds {
			if live[kind] {
				return undoable(h.def, i), nil
			}
		}
	}
	return undoable(h.def, from), nil
}

// undoable returns the last step at or before i that has an Undo.
func undoable(def *Definition, i int) int {
	for ; i >= 0; i-- {
		if def.Steps[i].Undo != nil {
			return i
		}
	}
	return -1
}
