package saga

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// conclude writes what a step's function returned. It may run again after a lost connection, and then decides the same.
// It reports whether the next attempt is open under the same lease.
func (d *Driver) conclude(ctx context.Context, a *activity, out Outcome, err error, how ending) (bool, error) {
	h := a.h
	if errors.Is(err, ErrFenced) || errors.Is(how.cause, ErrFenced) {
		d.core.stats.FencedOut.Add(1)
		return false, ErrFenced
	}
	if paused(err) {
		return d.ended(d.pause(ctx, h), h)
	}
	step := h.step()
	if err == nil {
		switch out.kind {
		case outcomeDone:
			return d.succeeded(ctx, h, out)
		case outcomeWait:
			return d.waits(ctx, h, out, how)
		case outcomeNone:
			err = Fail(step.Layer, commonv1.Reason_REASON_INTERNAL, fmt.Sprintf("the step %q answered nothing", step.Name), nil)
		}
	}
	var rows *rowsError
	switch {
	case errors.Is(how.cause, ErrCancelRequested):
		state := runs.AttemptCancelled
		if how.abandoned {
			state = runs.AttemptAbandoned
		}
		return d.cancelled(ctx, h, state, how.abandoned)
	case errors.Is(how.cause, ErrShutdown):
		return false, d.park(ctx, h, WaitFor{Why: "waiting for a worker: the last one shut down", WakeOnSignal: true},
			writes{})
	case errors.Is(how.cause, ErrBudget):
		late := &StepError{
			Layer: step.Layer, Reason: commonv1.Reason_REASON_DEADLINE_OF_STEP_EXCEEDED, Retryable: true, cause: err,
			Public: fmt.Sprintf("the step %q did not end within %s", step.Name, step.Budget),
		}
		if how.abandoned {
			return d.failed(ctx, h, runs.AttemptAbandoned, late)
		}
		return d.failed(ctx, h, runs.AttemptFailed, late)
	case errors.As(err, &rows):
		err = rows.err
	}
	return d.failed(ctx, h, runs.AttemptFailed, stepErrorOf(step, err))
}

// succeeded closes the attempt and goes on: forward to the next step, back to the next undo, or to the end.
func (d *Driver) succeeded(ctx context.Context, h *leasedRun, out Outcome) (bool, error) {
	raw, err := marshalOutput(out.output)
	if err != nil {
		return d.failed(ctx, h, runs.AttemptFailed,
			&StepError{Layer: h.step().Layer, Reason: commonv1.Reason_REASON_INTERNAL, Public: err.Error(), cause: err})
	}
	cl := closing{state: runs.AttemptSucceeded, output: raw}
	if h.run.Phase == runs.Undo {
		return d.undone(ctx, h, cl, out.rows)
	}
	if h.run.Step+1 < len(h.def.Steps) {
		return d.moved(d.advance(ctx, h, cl, nextAttempt{step: h.run.Step + 1, phase: runs.Do, rows: out.rows}), h)
	}
	err = d.release(ctx, h, cl, rest{
		state: runs.Succeeded, workspace: names.Of(h.def.States.Succeeded), rows: out.rows,
		point: "finish",
	})
	if err == nil {
		d.core.stats.Succeeded.Add(1)
	}
	return d.ended(err, h)
}

// undone goes one step further back, or ends the run as failed and clean.
func (d *Driver) undone(ctx context.Context, h *leasedRun, cl closing, rows writes) (bool, error) {
	if to := undoable(h.def, h.run.Step-1); to >= 0 {
		return d.moved(d.advance(ctx, h, cl, nextAttempt{step: to, phase: runs.Undo, passOver: true, rows: rows}), h)
	}
	err := d.release(ctx, h, cl, rest{
		state: runs.Failed, workspace: names.Of(h.def.States.Failed), passOver: true,
		rows: rows, point: "finish",
	})
	if err == nil {
		d.core.stats.Failed.Add(1)
	}
	return d.ended(err, h)
}

// waits parks the attempt, unless its budget is used up by then.
func (d *Driver) waits(ctx context.Context, h *leasedRun, out Outcome, how ending) (bool, error) {
	if errors.Is(how.cause, ErrCancelRequested) {
		return d.cancelled(ctx, h, runs.AttemptCancelled, false)
	}
	if out.wait.Why == "" {
		out.wait.Why = fmt.Sprintf("the step %q looks again later", h.attempt.Name)
	}
	if errors.Is(how.cause, ErrBudget) || h.left() <= 0 {
		step, why, last := h.step(), out.wait.Why, out.wait.Meanwhile.lastOutput()
		if out.wait.Meanwhile == nil && h.attempt.Error != "" { // the step has not been called again since
			why, last = h.attempt.Error, h.attempt.LastOutput
		}
		return d.failed(ctx, h, runs.AttemptFailed, &StepError{
			Layer: step.Layer, Reason: commonv1.Reason_REASON_DEADLINE_OF_STEP_EXCEEDED, Retryable: true,
			Public:     fmt.Sprintf("the step %q did not end within %s: %s", step.Name, step.Budget, why),
			LastOutput: last,
		})
	}
	err := d.park(ctx, h, out.wait, out.rows)
	return d.ended(err, h)
}

// park gives up the lease with the attempt open.
func (d *Driver) park(ctx context.Context, h *leasedRun, w WaitFor, rows writes) error {
	state := runs.Waiting
	if h.run.Phase == runs.Undo {
		state = runs.Compensating
	}
	after := max(min(w.For, h.left()), 0)
	err := d.release(ctx, h, closing{state: runs.AttemptWaiting, why: w.Why, err: w.Meanwhile}, rest{
		state: state, attempts: h.run.Attempts, after: after, wakeable: w.WakeOnSignal, why: w.Why, rows: rows, point: "park",
	})
	if err == nil {
		d.core.stats.Parked.Add(1)
		d.due(after)
		if w.WakeOnSignal {
			// A signal that came while the run was leased made it due at once.
			d.core.runnable.Notify()
		}
	}
	return err
}

func marshalOutput(v any) (json.RawMessage, error) {
	if v == nil {
		return nil, nil
	}
	raw, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("marshal output: %w", err)
	}
	return raw, nil
}
