package saga

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// errCancelPending means that a driver's compare-and-set missed because of a cancel, and that the driver still has the
// lease.
var errCancelPending = errors.New("a cancel is pending")

// columns are the arrays of transitionColumns.
type columns struct {
	ids, phases, states, clStates, clWhys, codes, errs, layers, whys, causes, lastOutputs, names []string
	outputs                                                                                      []*string
	fences, opSeqs, versions                                                                     []int64
	steps, attempts                                                                              []int32
	pass, keep                                                                                   []bool
	started                                                                                      []time.Time
	deadlines                                                                                    []*time.Time
	stalls                                                                                       []float64
}

func (c *columns) add(mv *transition, state, why string, keep bool, stall time.Duration) {
	code, text, layer := mv.cl.code()
	open := &mv.h.attempt
	c.ids, c.fences = append(c.ids, mv.h.run.ID), append(c.fences, mv.h.run.Fence)
	//nolint:gosec // small counts
	c.steps, c.phases = append(c.steps, int32(mv.h.run.Step)), append(c.phases, mv.h.run.Phase)
	//nolint:gosec // small counts
	c.pass, c.attempts = append(c.pass, mv.passOver()), append(c.attempts, int32(open.Attempt))
	c.clStates, c.clWhys = append(c.clStates, mv.cl.state), append(c.clWhys, mv.cl.why)
	c.codes, c.errs, c.layers = append(c.codes, code), append(c.errs, text), append(c.layers, layer)
	c.outputs = append(c.outputs, nullJSON(mv.cl.output))
	c.keep, c.states, c.whys = append(c.keep, keep), append(c.states, state), append(c.whys, why)
	c.causes, c.lastOutputs = append(c.causes, mv.cl.err.Cause()), append(c.lastOutputs, mv.cl.err.lastOutput())
	c.names, c.opSeqs, c.versions = append(c.names, open.Name), append(c.opSeqs, open.OpSeq),
		append(c.versions, open.Version)
	c.started, c.deadlines, c.stalls = append(c.started, open.StartedAt), append(c.deadlines, open.DeadlineAt),
		append(c.stalls, stall.Seconds())
}

func (c *columns) args(more ...any) []any {
	return append([]any{
		c.ids, c.fences, c.steps, c.phases, c.pass, c.attempts, c.clStates, c.clWhys, c.codes, c.errs, c.layers, c.outputs,
		c.keep, c.states, c.whys, c.causes, c.lastOutputs, c.names, c.opSeqs, c.started, c.deadlines, c.stalls, c.versions,
	}, more...)
}

func (c *Core) advanceAll(ctx context.Context, tx pgx.Tx, moves []*transition, j *eventBuffer) error {
	if len(moves) == 0 {
		return nil
	}
	var cols columns
	var steps []int32
	var phases []string
	var bumps []bool
	for _, mv := range moves {
		to := mv.next
		cols.add(mv, to.state(), doing(to.phase, mv.h.def.Steps[to.step].Name), to.keepError,
			c.stallAfter(mv.h.def, mv.h.step()))
		//nolint:gosec // small counts
		steps, phases, bumps = append(steps, int32(to.step)), append(phases, to.phase), append(bumps, to.bumpFence)
	}
	rows, err := pg.All[advancedRow](ctx, tx, advanceRuns, cols.args(steps, phases, bumps)...)
	if err != nil {
		return fmt.Errorf("advance runs: %w", err)
	}
	found := make(map[string]*advancedRow, len(rows))
	for i := range rows {
		found[rows[i].ID] = &rows[i]
	}
	var runs []*Run
	for _, mv := range moves {
		row, ok := found[mv.h.run.ID]
		if !ok {
			if mv.err = c.whyMissed(ctx, tx, mv); mv.err != nil && !isMiss(mv.err) {
				return mv.err
			}
			continue
		}
		mv.to = leasedRun{def: mv.h.def, run: mv.h.run, paused: row.Paused}
		if err := c.copyAdvanced(ctx, tx, mv, row); err != nil {
			return err
		}
		runs = append(runs, &mv.to.run)
	}
	if err := c.drawRanges(ctx, tx, runs); err != nil {
		return err
	}
	for _, mv := range moves {
		if mv.err != nil {
			continue
		}
		to := &mv.to
		to.openIn()
		to.runLeft = noDeadline
		if to.run.DeadlineAt != nil {
			to.runLeft = to.run.DeadlineAt.Sub(to.attempt.StartedAt)
		}
		to.overdue = to.runLeft <= 0
		row := found[mv.h.run.ID]
		closed, err := c.closedAttempt(ctx, tx, mv, row.ClosedVersion, row.ClosedAt)
		if err != nil {
			return err
		}
		j.step(&closed)
		j.step(&to.attempt)
		j.run(&to.run)
		if mv.next.phase == phaseUndo && mv.h.run.Phase == phaseDo {
			if err := c.touchWorkspace(ctx, tx, &to.run, j, "", to.run.ErrorCode, to.run.Error); err != nil {
				return err
			}
		}
	}
	return nil
}

// noDeadline is the time left (leasedRun.runLeft) that is assumed for a run without a deadline.
const noDeadline = 24 * time.Hour

// state returns the state of the run while the attempt is open.
func (n *nextAttempt) state() string {
	if n.phase == phaseUndo {
		return stateCompensating
	}
	return stateRunning
}

// copyAdvanced updates the copy of a run to the row that the statement wrote. If the version shows that others have
// written the row too, the row is read again.
func (c *Core) copyAdvanced(ctx context.Context, tx pgx.Tx, mv *transition, row *advancedRow) error {
	run, to := &mv.to.run, mv.next
	if row.Version != run.Version+1 {
		now, err := GetRun(ctx, tx, run.ID)
		*run = now
		return err
	}
	run.Step, run.Phase, run.State, run.WhyWaiting = to.step, to.phase, to.state(),
		doing(to.phase, mv.h.def.Steps[to.step].Name)
	run.Attempts, run.Losses, run.TriedSince = 0, 0, row.TriedSince
	run.Fence, run.Signal, run.Version, run.StuckReason = row.Fence, row.Signal, row.Version, row.Stuck
	run.OpSeq, run.OpLast, run.OpenAttempt, run.OpenSince = row.OpSeq, row.OpLast, 1, &row.OpenSince
	if to.keepError {
		run.copyError(mv)
	}
	return nil
}

func (r *Run) copyError(mv *transition) {
	r.ErrorCode, r.Error, r.ErrorLayer = mv.cl.code()
	r.ErrorStep = mv.h.run.Step
}

// closedAttempt returns the attempt as it was closed or parked: the driver's copy with the columns that the statement
// wrote, or the stored row if others have written it too.
func (c *Core) closedAttempt(ctx context.Context, tx pgx.Tx, mv *transition, version int64,
	finished *time.Time,
) (Attempt, error) {
	a := mv.h.attempt
	switch version {
	case 0:
		return a, fmt.Errorf("run %s is ours, but its open attempt is not the one that ends", a.RunID)
	case a.Version + 1:
	default:
		now, err := pg.One[Attempt](ctx, tx, attemptByKey, a.RunID, a.Step, a.Dir, a.Attempt)
		if err != nil {
			return now, fmt.Errorf("read attempt: %w", err)
		}
		return now, nil
	}
	a.State, a.WhyWaiting, a.FinishedAt, a.Version = mv.cl.state, mv.cl.why, finished, version
	if code, text, layer := mv.cl.code(); mv.cl.state != attemptWaiting || code != "" {
		a.ErrorCode, a.Error, a.ErrorLayer, a.Cause, a.LastOutput = code, text, layer, mv.cl.err.Cause(),
			mv.cl.err.lastOutput()
	}
	if len(mv.cl.output) > 0 {
		a.Output = mv.cl.output
	}
	return a, nil
}

func (c *Core) releaseRuns(ctx context.Context, tx pgx.Tx, moves []*transition, j *eventBuffer) error {
	if len(moves) == 0 {
		return nil
	}
	var cols columns
	var wakeable []bool
	var tries []int32
	var signals []int64
	var after []float64
	var stuck []string
	for _, mv := range moves {
		to := mv.rest
		cols.add(mv, to.state, to.why, to.keepError, c.stallAfter(mv.h.def, mv.h.step()))
		wakeable, tries = append(wakeable, to.wakeable), append(tries, int32(to.attempts)) //nolint:gosec // small counts
		signals, after = append(signals, mv.h.run.Signal), append(after, to.after.Seconds())
		stuck = append(stuck, to.stuck)
	}
	rows, err := pg.All[releasedRow](ctx, tx, releaseLeases, cols.args(wakeable, tries, signals, after, stuck)...)
	if err != nil {
		return fmt.Errorf("release runs: %w", err)
	}
	found := make(map[string]*releasedRow, len(rows))
	for i := range rows {
		found[rows[i].ID] = &rows[i]
	}
	for _, mv := range moves {
		row, ok := found[mv.h.run.ID]
		if !ok {
			if mv.err = c.whyMissed(ctx, tx, mv); mv.err != nil && !isMiss(mv.err) {
				return mv.err
			}
			continue
		}
		if err := c.copyReleased(ctx, tx, mv, row); err != nil {
			return err
		}
		closed, err := c.closedAttempt(ctx, tx, mv, row.ClosedVersion, row.ClosedAt)
		if err != nil {
			return err
		}
		j.step(&closed)
		j.run(&mv.runNow)
	}
	if err := c.touchWorkspaces(ctx, tx, moves, j); err != nil {
		return err
	}
	for _, mv := range moves {
		if mv.err == nil {
			j.decided(ctx, &mv.runNow)
		}
	}
	return nil
}

// copyReleased is copyAdvanced for a run whose lease was given up.
func (c *Core) copyReleased(ctx context.Context, tx pgx.Tx, mv *transition, row *releasedRow) error {
	run, to := mv.h.run, mv.rest
	if row.Version != run.Version+1 {
		now, err := GetRun(ctx, tx, run.ID)
		mv.runNow = now
		return err
	}
	run.State, run.Owner, run.LeaseUntil, run.WhyWaiting = to.state, "", nil, to.why
	run.Attempts, run.Losses, run.NextAt, run.FinishedAt = to.attempts, 0, row.NextAt, row.Finished
	run.StuckReason, run.Version, run.OpenAttempt, run.OpenSince = row.Stuck, row.Version, 0, nil
	if to.keepError {
		run.copyError(mv)
	}
	mv.runNow = run
	return nil
}

// isMiss reports whether err concerns one run's compare-and-set alone, so that the other runs of the transaction go on.
func isMiss(err error) bool { return errors.Is(err, ErrFenced) || errors.Is(err, errCancelPending) }

// whyMissed returns errCancelPending or ErrFenced for a compare-and-set that found no row, according to the run's
// present row. Any other error fails the transaction.
func (c *Core) whyMissed(ctx context.Context, tx pgx.Tx, mv *transition) error {
	now, err := GetRun(ctx, tx, mv.h.run.ID)
	if err != nil {
		return err
	}
	was := &mv.h.run
	ours := now.Fence == was.Fence && now.Owner == was.Owner
	switch {
	case ours && now.Step == was.Step && now.Phase == was.Phase && !mv.passOver() && now.Phase == phaseDo &&
		now.CancelAt != nil:
		mv.runNow = now
		return errCancelPending
	case ours && now.Live():
		return fmt.Errorf("run %s is ours, but its open attempt is not the one that ends", now.ID)
	}
	c.stats.FencedOut.Add(1)
	return ErrFenced
}

func doing(phase, step string) string {
	if phase == phaseUndo {
		return fmt.Sprintf("undoing the step %q", step)
	}
	return fmt.Sprintf("doing the step %q", step)
}

func nullJSON(raw json.RawMessage) *string {
	if len(raw) == 0 {
		return nil
	}
	text := string(raw)
	return &text
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

func join(lists ...[]any) []any {
	var out []any
	for _, l := range lists {
		out = append(out, l...)
	}
	return out
}
