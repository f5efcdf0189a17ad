package saga

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// leaseMargin is how long before its granted end the driver gives a lease up, at most: a tenth of the lease is enough.
const leaseMargin = 500 * time.Millisecond

// lastCheck is the time that an attempt gets which wakes at the end of its budget: what it waited for may have
// happened.
const lastCheck = 2 * time.Second

// drive executes attempts of one leased run until the run parks, ends or is stuck, or the lease is lost.
func (d *Driver) drive(work context.Context, a *activity) {
	defer d.forget(a)
	log := d.log.With(slog.String("workflow_id", a.h.run.ID), slog.String("workspace_id", a.h.run.WorkspaceID),
		slog.String("tenant_id", a.h.run.TenantID),
		slog.String("correlation_id", a.h.run.CorrelationID))
	for {
		more, err := d.attempt(work, a)
		a.mu.Lock()
		a.fence = a.h.run.Fence // an abandoned step raised it
		a.mu.Unlock()
		switch {
		case err == nil && more:
			continue
		case err == nil:
			return
		case errors.Is(err, ErrFenced):
			// Another driver has the run. Everything that this driver writes or sends is refused by its fence; it stops without
			// reporting a failure.
			log.InfoContext(work, "fenced_out", slog.Int("step", a.h.run.Step), slog.Int64("fence", a.h.run.Fence))
			return
		default:
			log.WarnContext(work, "run dropped until its lease ends", slog.Int("step", a.h.run.Step),
				slog.String("error", err.Error()))
			return
		}
	}
}

// attempt executes one attempt and writes its result. It reports whether another attempt is open under the same lease.
func (d *Driver) attempt(work context.Context, a *activity) (bool, error) {
	h := a.h
	if a.lost() {
		return false, ErrFenced
	}
	step := h.step()
	forward := h.run.Phase == runs.Do
	switch {
	case h.paused:
		return d.commitWithRetry(work, a, func(ctx context.Context) (bool, error) { return false, d.pause(ctx, h) })
	case forward && h.run.CancelAt != nil:
		return d.commitWithRetry(work, a,
			func(ctx context.Context) (bool, error) { return d.cancelled(ctx, h, runs.AttemptCancelled, false) })
	case d.stopping(work):
		return d.commitWithRetry(work, a, func(ctx context.Context) (bool, error) {
			return false, d.park(ctx, h, WaitFor{Why: "waiting for a worker: the last one shut down", WakeOnSignal: true},
				writes{})
		})
	case forward && h.overdue:
		late := &StepError{
			Layer: step.Layer, Reason: commonv1.Reason_REASON_DEADLINE_EXCEEDED,
			Public: "the operation is past its deadline",
		}
		return d.commitWithRetry(work, a,
			func(ctx context.Context) (bool, error) { return d.exhausted(ctx, h, runs.AttemptFailed, late) })
	case h.run.Losses >= d.cfg.MaxLosses:
		lost := &StepError{
			Layer: step.Layer, Reason: commonv1.Reason_REASON_INTERNAL,
			Public: fmt.Sprintf("%d workers in a row were lost at this step", h.run.Losses),
		}
		return d.commitWithRetry(work, a,
			func(ctx context.Context) (bool, error) { return d.exhausted(ctx, h, runs.AttemptFailed, lost) })
	}
	ans, how := d.call(work, a)
	if a.lost() {
		return false, ErrFenced
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
	out Outcome
	err error
}

// call runs the step's function on a context of its own, bounded by the attempt's budget and by the lease.
func (d *Driver) call(work context.Context, a *activity) (answer, ending) {
	h := a.h
	step := h.step()
	ctx, cancel := context.WithCancelCause(work)
	defer cancel(nil)
	limit := h.left()
	if limit <= 0 {
		limit = lastCheck
	}
	ctx, stop := context.WithTimeoutCause(ctx, limit, ErrBudget)
	defer stop()
	a.mu.Lock()
	a.cancel = cancel
	a.undoing = h.run.Phase == runs.Undo
	switch {
	case a.dead:
		cancel(ErrFenced)
	case a.cancelAt && !a.undoing:
		cancel(ErrCancelRequested)
	case d.stopping(work):
		cancel(ErrShutdown)
	}
	a.mu.Unlock()
	defer func() {
		a.mu.Lock()
		a.cancel = nil
		a.mu.Unlock()
	}()
	env := d.env(h)
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
	case errors.Is(how.cause, ErrShutdown):
		// stop waits for StopGrace itself and then marks the lease as lost: a stopping driver does not make a step fail.
	case errors.Is(how.cause, ErrFenced):
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
			if a.lost() {
				how.abandoned = true
				return answer{err: ErrFenced}, how
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
func (d *Driver) perform(ctx context.Context, step *Step, env *Env) (Outcome, error) {
	if env.Direction == commonv1.Direction_DIRECTION_UNDO {
		return step.Undo(ctx, env)
	}
	if step.Class == Create && step.Observe != nil && (env.Attempt > 1 || env.Round > 1) {
		seen, err := step.Observe(ctx, env)
		if err != nil {
			return Outcome{}, fmt.Errorf("observe step %q: %w", step.Name, err)
		}
		if seen.Presence == Present {
			return Done(seen.Output, seen.Rows), nil
		}
	}
	return step.Do(ctx, env)
}

func (d *Driver) env(h *leasedRun) *Env {
	return &Env{
		RunID: h.run.ID, WorkspaceID: h.run.WorkspaceID, TenantID: h.run.TenantID, CorrelationID: h.run.CorrelationID,
		Requester: h.run.Requester, Kind: h.run.OperationKind(), Round: h.run.Round,
		Step: h.run.Step, StepName: h.attempt.Name, Direction: h.run.Direction(),
		Attempt: h.attempt.Attempt, Epoch: h.run.Epoch, OpSeq: h.attempt.OpSeq, Fence: h.run.Fence,
		IdempotencyKey: h.attempt.IdemKey, Input: h.run.Input,
		core:    d.core,
		outputs: maps.Clone(h.outputs),
	}
}

func (d *Driver) stopping(work context.Context) bool { return work.Err() != nil || d.halt.Load() }
