package drive

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
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
	open := &mv.h.Attempt
	c.ids, c.fences = append(c.ids, mv.h.Run.ID), append(c.fences, mv.h.Run.Fence)
	// small counts
	c.steps, c.phases = append(c.steps, int32(mv.h.Run.Step)), append(c.phases, mv.h.Run.Phase)
	// small counts
	c.pass, c.attempts = append(c.pass, mv.passOver()), append(c.attempts, int32(open.Attempt))
	c.clStates, c.clWhys = append(c.clStates, mv.cl.state), append(c.clWhys, mv.cl.why)
	c.codes, c.errs, c.layers = append(c.codes, code), append(c.errs, text), append(c.layers, layer)
	c.outputs = append(c.outputs, nullJSON(mv.cl.output))
	c.keep, c.states, c.whys = append(c.keep, keep), append(c.states, state), append(c.whys, why)
	c.causes, c.lastOutputs = append(c.causes, mv.cl.err.Cause()), append(c.lastOutputs, lastOutput(mv.cl.err))
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

// copyError writes the error of the attempt that ends to its run.
func copyError(r *runs.Run, mv *transition) {
	r.ErrorCode, r.Error, r.ErrorLayer = mv.cl.code()
	r.ErrorStep = mv.h.Run.Step
}

// closedAttempt returns the attempt as it was closed or parked: the driver's copy with the columns that the statement
// wrote, or the stored row if others have written it too.
func (d *Driver) closedAttempt(ctx context.Context, tx pgx.Tx, mv *transition, version int64,
	finished *time.Time,
) (runs.Attempt, error) {
	a := mv.h.Attempt
	switch version {
	case 0:
		return a, fmt.Errorf("run %s is ours, but its open attempt is not the one that ends", a.RunID)
	case a.Version + 1:
	default:
		now, err := pg.One[runs.Attempt](ctx, tx, attemptByKey, a.RunID, a.Step, a.Dir, a.Attempt)
		if err != nil {
			return now, fmt.Errorf("read attempt: %w", err)
		}
		return now, nil
	}
	a.State, a.WhyWaiting, a.FinishedAt, a.Version = mv.cl.state, mv.cl.why, finished, version
	if code, text, layer := mv.cl.code(); mv.cl.state != runs.AttemptWaiting || code != "" {
		a.ErrorCode, a.Error, a.ErrorLayer, a.Cause, a.LastOutput = code, text, layer, mv.cl.err.Cause(),
			lastOutput(mv.cl.err)
	}
	if len(mv.cl.output) > 0 {
		a.Output = mv.cl.output
	}
	return a, nil
}

// isMiss reports whether err concerns one run's compare-and-set alone, so that the other runs of the transaction go on.
func isMiss(err error) bool {
	return errors.Is(err, saga.ErrFenced) || errors.Is(err, errCancelPending)
}

// whyMissed returns errCancelPending or ErrFenced for a compare-and-set that found no row, according to the run's
// present row. Any other error fails the transaction.
func (d *Driver) whyMissed(ctx context.Context, tx pgx.Tx, mv *transition) error {
	now, err := runs.Get(ctx, tx, mv.h.Run.ID)
	if err != nil {
		return err
	}
	was := &mv.h.Run
	ours := now.Fence == was.Fence && now.Owner == was.Owner
	switch {
	case ours && now.Step == was.Step && now.Phase == was.Phase && !mv.passOver() && now.Phase == runs.Do &&
		now.CancelAt != nil:
		mv.runNow = now
		return errCancelPending
	case ours && now.Live():
		return fmt.Errorf("run %s is ours, but its open attempt is not the one that ends", now.ID)
	}
	d.core.Stats().FencedOut.Add(1)
	return saga.ErrFenced
}

func nullJSON(raw json.RawMessage) *string {
	if len(raw) == 0 {
		return nil
	}
	text := string(raw)
	return &text
}
