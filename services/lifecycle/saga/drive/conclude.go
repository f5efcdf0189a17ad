package drive

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/lease"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// conclude writes what a step's function returned. It may run again after a lost connection, and then decides the same.
// It reports whether the next attempt is open under the same lease.
func (d *Driver) conclude(ctx context.Context, a *lease.Activity, out saga.Outcome, err error,
	how ending,
) (bool, error) {
	h := a.Leased
	if errors.Is(err, saga.ErrFenced) || errors.Is(how.cause, saga.ErrFenced) {
		d.core.Stats().FencedOut.Add(1)
		return false, saga.ErrFenced
	}
	if paused(err) {
		return d.stepFailure(d.pause(ctx, h), h)
	}
	step := h.Step()
	if err == nil {
		switch {
		case out.Ends():
			return d.succeeded(ctx, h, out)
		case out.Waits():
			return d.waits(ctx, h, out, how)
		default:
			err = saga.Fail(step.Layer, commonv1.Reason_REASON_INTERNAL,
				fmt.Sprintf("the step %q answered nothing", step.Name), nil)
		}
	}
	var rows *rowsError
	switch {
	case errors.Is(how.cause, saga.ErrCancelRequested):
		state := runs.AttemptCancelled
		if how.abandoned {
			state = runs.AttemptAbandoned
		}
		return d.cancelled(ctx, h, state, how.abandoned)
	case errors.Is(how.cause, saga.ErrShutdown):
		return false, d.park(ctx, h, saga.WaitFor{Why: "waiting for a worker: the last one shut down", WakeOnSignal: true},
			saga.Writes{})
	case errors.Is(how.cause, saga.ErrBudget):
		late := (&saga.StepError{
			Layer: step.Layer, Reason: commonv1.Reason_REASON_DEADLINE_OF_STEP_EXCEEDED, Retryable: true,
			Public: fmt.Sprintf("the step %q did not end within %s", step.Name, step.Budget),
		}).WithCause(err)
		if how.abandoned {
			return d.failed(ctx, h, runs.AttemptAbandoned, late)
		}
		return d.failed(ctx, h, runs.AttemptFailed, late)
	case errors.As(err, &rows):
		err = rows.err
	}
	return d.failed(ctx, h, runs.AttemptFailed, saga.StepErrorOf(step, err))
}

// succeeded closes the attempt and goes on: forward to the next step, back to the next undo, or to the end.
func (d *Driver) succeeded(ctx context.Context, h *lease.Run, out saga.Outcome) (bool, error) {
	raw, err := marshalOutput(out.Output())
	if err != nil {
		e := &saga.StepError{Layer: h.Step().Layer, Reason: commonv1.Reason_REASON_INTERNAL, Public: err.Error()}
		return d.failed(ctx, h, runs.AttemptFailed, e.WithCause(err))
	}
	cl := closing{state: runs.AttemptSucceeded, output: raw}
	if h.Run.Phase == runs.Undo {
		return d.undone(ctx, h, cl, out.Writes())
	}
	if h.Run.Step+1 < len(h.Def.Steps) {
		next := nextAttempt{step: h.Run.Step + 1, phase: runs.Do, rows: out.Writes()}
		return d.committed(d.submit(ctx, &transition{h: h, cl: cl, attempt: &next}), h)
	}
	err = d.submit(ctx, &transition{h: h, cl: cl, release: &release{
		state: runs.Succeeded, workspace: names.Of(h.Def.States.Succeeded), rows: out.Writes(),
		point: "finish",
	}})
	if err == nil {
		d.core.Stats().Succeeded.Add(1)
	}
	return d.stepFailure(err, h)
}

// undone goes one step further back, or ends the run as failed and clean.
func (d *Driver) undone(ctx context.Context, h *lease.Run, cl closing, rows saga.Writes) (bool, error) {
	if to := h.Def.Undoable(h.Run.Step - 1); to >= 0 {
		next := nextAttempt{step: to, phase: runs.Undo, passOver: true, rows: rows}
		return d.committed(d.submit(ctx, &transition{h: h, cl: cl, attempt: &next}), h)
	}
	err := d.submit(ctx, &transition{h: h, cl: cl, release: &release{
		state: runs.Failed, workspace: names.Of(h.Def.States.Failed), passOver: true,
		rows: rows, point: "finish",
	}})
	if err == nil {
		d.core.Stats().Failed.Add(1)
	}
	return d.stepFailure(err, h)
}

// waits parks the attempt, unless its budget is used up by then.
func (d *Driver) waits(ctx context.Context, h *lease.Run, out saga.Outcome, how ending) (bool, error) {
	if errors.Is(how.cause, saga.ErrCancelRequested) {
		return d.cancelled(ctx, h, runs.AttemptCancelled, false)
	}
	wait := out.WaitsFor()
	if wait.Why == "" {
		wait.Why = fmt.Sprintf("the step %q looks again later", h.Attempt.Name)
	}
	if errors.Is(how.cause, saga.ErrBudget) || h.Left() <= 0 {
		step, why, last := h.Step(), wait.Why, lastOutput(wait.Meanwhile)
		if wait.Meanwhile == nil && h.Attempt.Error != "" { // the step has not been called again since
			why, last = h.Attempt.Error, h.Attempt.LastOutput
		}
		return d.failed(ctx, h, runs.AttemptFailed, &saga.StepError{
			Layer: step.Layer, Reason: commonv1.Reason_REASON_DEADLINE_OF_STEP_EXCEEDED, Retryable: true,
			Public:     fmt.Sprintf("the step %q did not end within %s: %s", step.Name, step.Budget, why),
			LastOutput: last,
		})
	}
	err := d.park(ctx, h, wait, out.Writes())
	return d.stepFailure(err, h)
}

// park gives up the lease with the attempt open.
func (d *Driver) park(ctx context.Context, h *lease.Run, w saga.WaitFor, rows saga.Writes) error {
	state := runs.Waiting
	if h.Run.Phase == runs.Undo {
		state = runs.Compensating
	}
	after := max(min(w.For, h.Left()), 0)
	cl := closing{state: runs.AttemptWaiting, why: w.Why, err: w.Meanwhile}
	err := d.submit(ctx, &transition{h: h, cl: cl, release: &release{
		state: state, attempts: h.Run.Attempts, after: after, wakeable: w.WakeOnSignal, why: w.Why, rows: rows, point: "park",
	}})
	if err == nil {
		d.core.Stats().Parked.Add(1)
		d.due(after)
		if w.WakeOnSignal {
			// A signal that came while the run was leased made it due at once.
			d.core.Runnable().Notify()
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
