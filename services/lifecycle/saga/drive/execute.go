package drive

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/lease"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// lastCheck is the time that an attempt gets which wakes at the end of its budget: what it waited for may have
// happened.
const lastCheck = 2 * time.Second

// drive executes attempts of one leased run until the run parks, ends or is stuck, or the lease is lost.
func (d *Driver) drive(work context.Context, a *lease.Activity) {
	defer d.leases.Forget(a)
	log := d.log.With(slog.String("workflow_id", a.Leased.Run.ID), slog.String("workspace_id", a.Leased.Run.WorkspaceID),
		slog.String("tenant_id", a.Leased.Run.TenantID),
		slog.String("correlation_id", a.Leased.Run.CorrelationID))
	for {
		more, err := d.attempt(work, a)
		a.SetFence(a.Leased.Run.Fence) // an abandoned step has raised it
		switch {
		case err == nil && more:
			continue
		case err == nil:
			return
		case errors.Is(err, saga.ErrFenced):
			// Another driver has the run. Everything that this driver writes or sends is refused by its fence; it stops without
			// reporting a failure.
			log.InfoContext(work, "fenced_out", slog.Int("step", a.Leased.Run.Step), slog.Int64("fence", a.Leased.Run.Fence))
			return
		default:
			log.WarnContext(work, "run dropped until its lease ends", slog.Int("step", a.Leased.Run.Step),
				slog.String("error", err.Error()))
			return
		}
	}
}

// attempt executes one attempt and writes its result. It reports whether another attempt is open under the same lease.
func (d *Driver) attempt(work context.Context, a *lease.Activity) (bool, error) {
	h := a.Leased
	if a.Lost() {
		return false, saga.ErrFenced
	}
	step := h.Step()
	forward := h.Run.Phase == runs.Do
	switch {
	case h.Paused:
		return d.commitWithRetry(work, a, func(ctx context.Context) (bool, error) { return false, d.pause(ctx, h) })
	case forward && h.Run.CancelAt != nil:
		return d.commitWithRetry(work, a,
			func(ctx context.Context) (bool, error) { return d.cancelled(ctx, h, runs.AttemptCancelled, false) })
	case d.stopping(work):
		return d.commitWithRetry(work, a, func(ctx context.Context) (bool, error) {
			return false, d.park(ctx, h, saga.WaitFor{Why: "waiting for a worker: the last one shut down", WakeOnSignal: true},
				saga.Writes{})
		})
	case forward && h.Overdue:
		late := &saga.StepError{
			Layer: step.Layer, Reason: commonv1.Reason_REASON_DEADLINE_EXCEEDED,
			Public: "the operation is past its deadline",
		}
		return d.commitWithRetry(work, a,
			func(ctx context.Context) (bool, error) { return d.exhausted(ctx, h, runs.AttemptFailed, late) })
	case h.Run.Losses >= d.cfg.MaxLosses:
		lost := &saga.StepError{
			Layer: step.Layer, Reason: commonv1.Reason_REASON_INTERNAL,
			Public: fmt.Sprintf("%d workers in a row were lost at this step", h.Run.Losses),
		}
		return d.commitWithRetry(work, a,
			func(ctx context.Context) (bool, error) { return d.exhausted(ctx, h, runs.AttemptFailed, lost) })
	}
	ans, how := d.call(work, a)
	if a.Lost() {
		return false, saga.ErrFenced
	}
	return d.commitWithRetry(work, a,
		func(ctx context.Context) (bool, error) { return d.conclude(ctx, a, ans.out, ans.err, how) })
}

// ending is why a step's context ended before the step did.
type ending struct {
	cause     error // nil: the context did not end first
	abandoned bool  // the step did not return within the grace
}

type answer struct {
	out saga.Outcome
	err error
}

// call runs the step's function on a context of its own, bounded by the attempt's budget and by the lease.
func (d *Driver) call(work context.Context, a *lease.Activity) (answer, ending) {
	h := a.Leased
	step := h.Step()
	ctx, cancel := context.WithCancelCause(work)
	defer cancel(nil)
	limit := h.Left()
	if limit <= 0 {
		limit = lastCheck
	}
	ctx, stop := context.WithTimeoutCause(ctx, limit, saga.ErrBudget)
	defer stop()
	if !a.Enter(cancel, h.Run.Phase == runs.Undo) && d.stopping(work) {
		cancel(saga.ErrShutdown)
	}
	defer a.Leave()
	env := d.core.Env(&h.Run, &h.Attempt, h.Stage, maps.Clone(h.Outputs))
	done := make(chan answer, 1)
	go func() {
		var ans answer
		if err := app.Protect(ctx, func(ctx context.Context) error {
			ans.out, ans.err = d.perform(ctx, step, env)
			return nil
		}); err != nil {
			ans = answer{err: err}
		}
		done <- ans
	}()
	select {
	case ans := <-done:
		return ans, endingOf(ctx)
	case <-ctx.Done():
	}
	how := endingOf(ctx)
	var over <-chan time.Time
	switch {
	case errors.Is(how.cause, saga.ErrShutdown):
		// stop waits for StopGrace itself and then marks the lease as lost: a stopping driver does not make a step fail.
	case errors.Is(how.cause, saga.ErrFenced):
		over = time.After(0)
	default:
		over = time.After(d.cfg.grace())
	}
	lost := time.NewTicker(100 * time.Millisecond)
	defer lost.Stop()
	for {
		select {
		case ans := <-done:
			return ans, how
		case <-over:
			how.abandoned = true
			return answer{err: how.cause}, how
		case <-lost.C:
			if a.Lost() {
				how.abandoned = true
				return answer{err: saga.ErrFenced}, how
			}
		}
	}
}

func endingOf(ctx context.Context) ending {
	if ctx.Err() == nil {
		return ending{}
	}
	return ending{cause: context.Cause(ctx)}
}

// perform calls Do or Undo. For a Create step that may have run before it calls Observe first, so that the resource is
// not made twice.
func (d *Driver) perform(ctx context.Context, step *saga.Step, env *saga.Env) (saga.Outcome, error) {
	if env.Direction == commonv1.Direction_DIRECTION_UNDO {
		return step.Undo(ctx, env)
	}
	if step.Class == saga.Create && step.Observe != nil && (env.Attempt > 1 || env.Round > 1) {
		seen, err := step.Observe(ctx, env)
		if err != nil {
			return saga.Outcome{}, fmt.Errorf("observe step %q: %w", step.Name, err)
		}
		if seen.Presence == saga.Present {
			return saga.Done(seen.Output, seen.Rows), nil
		}
	}
	return step.Do(ctx, env)
}

func (d *Driver) stopping(work context.Context) bool { return work.Err() != nil || d.halt.Load() }
