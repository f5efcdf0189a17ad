package drive

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/lease"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// committed and stepFailure classify the errors of a write: an error of the step's own rows becomes a failure of the
// step.
func (d *Driver) committed(err error, h *lease.Run) (bool, error) {
	if err == nil {
		return true, nil
	}
	return d.stepFailure(err, h)
}

func (d *Driver) stepFailure(err error, h *lease.Run) (bool, error) {
	var rows *rowsError
	if err == nil || !errors.As(err, &rows) || waitable(err) || errors.Is(err, saga.ErrFenced) {
		return false, err
	}
	return false, &stepFailureError{step: saga.StepErrorOf(h.Step(), rows.err)}
}

// stepFailureError makes commitWithRetry fail the step with this error.
type stepFailureError struct{ step *saga.StepError }

func (e *stepFailureError) Error() string { return e.step.Error() }

func (e *stepFailureError) Unwrap() error { return e.step }

// commitWithRetry calls write, which commits the result of an attempt. While the lease is valid, it repeats a write
// that failed because of the connection. If the outcome of a commit is unknown, it makes the run due at once and leaves
// the rest to the next lease.
func (d *Driver) commitWithRetry(work context.Context, a *lease.Activity,
	write func(ctx context.Context) (bool, error),
) (bool, error) {
	wait := 20 * time.Millisecond
	for {
		more, err := write(work)
		if errors.Is(err, errCancelPending) {
			return true, nil // the run is cancelled: the next call of attempt handles it, with the attempt still open
		}
		if failure, ok := errors.AsType[*stepFailureError](err); ok {
			write = func(ctx context.Context) (bool, error) {
				return d.failed(ctx, a.Leased, runs.AttemptFailed, failure.step)
			}
			continue
		}
		if err == nil || errors.Is(err, saga.ErrFenced) || !waitable(err) {
			return more, err
		}
		d.log.WarnContext(work, "database did not take a step, asking again", slog.String("workflow_id", a.Leased.Run.ID),
			slog.String("error", err.Error()))
		if a.Lost() || !app.Sleep(work, wait) {
			return false, saga.ErrFenced
		}
		wait = min(2*wait, time.Second)
		if errors.Is(err, pg.ErrCommitUnknown) {
			// Whether the commit happened decides how the run goes on. Make the run due at once: the next lease reads its row.
			return false, d.letGo(work, a)
		}
	}
}

func waitable(err error) bool {
	return pg.IsConnError(err) || errors.Is(err, pg.ErrCommitUnknown)
}

// letGo makes the run due at once if this driver still has it leased. It repeats the statement until it succeeds or the
// lease is lost.
func (d *Driver) letGo(work context.Context, a *lease.Activity) error {
	for wait := 20 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		_, err := d.leases.LetGo(work, a.Leased)
		if err == nil {
			d.core.Runnable().Notify()
			return nil
		}
		if a.Lost() || !app.Sleep(work, wait) {
			return err
		}
	}
}
