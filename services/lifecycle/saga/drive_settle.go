package saga

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// moved and ended classify the errors of a write: an error of the step's own rows becomes a failure of the step.
func (d *Driver) moved(err error, h *leasedRun) (bool, error) {
	if err == nil {
		return true, nil
	}
	return d.ended(err, h)
}

func (d *Driver) ended(err error, h *leasedRun) (bool, error) {
	var rows *rowsError
	if err == nil || !errors.As(err, &rows) || waitable(err) || errors.Is(err, ErrFenced) {
		return false, err
	}
	return false, &stepFailureError{step: stepErrorOf(h.step(), rows.err)}
}

// stepFailureError makes commitWithRetry fail the step with this error.
type stepFailureError struct{ step *StepError }

func (e *stepFailureError) Error() string { return e.step.Error() }

func (e *stepFailureError) Unwrap() error { return e.step }

// commitWithRetry calls write, which commits the result of an attempt. While the lease is valid, it repeats a write
// that failed because of the connection. If the outcome of a commit is unknown, it makes the run due at once and leaves
// the rest to the next lease.
func (d *Driver) commitWithRetry(work context.Context, a *activity,
	write func(ctx context.Context) (bool, error),
) (bool, error) {
	wait := 20 * time.Millisecond
	for {
		more, err := write(work)
		if errors.Is(err, errCancelPending) {
			return true, nil // the run is cancelled: the next call of attempt handles it, with the attempt still open
		}
		if failure, ok := errors.AsType[*stepFailureError](err); ok {
			write = func(ctx context.Context) (bool, error) { return d.failed(ctx, a.h, runs.AttemptFailed, failure.step) }
			continue
		}
		if err == nil || errors.Is(err, ErrFenced) || !waitable(err) {
			return more, err
		}
		d.log.WarnContext(work, "database did not take a step, asking again", slog.String("workflow_id", a.h.run.ID),
			slog.String("error", err.Error()))
		if a.lost() || !app.Sleep(work, wait) {
			return false, ErrFenced
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
func (d *Driver) letGo(work context.Context, a *activity) error {
	for wait := 20 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		_, err := pg.Exec(work, d.core.db, letGoRun, a.h.run.ID, a.h.run.Fence, d.cfg.Owner)
		if err == nil {
			d.core.runnable.Notify()
			return nil
		}
		if a.lost() || !app.Sleep(work, wait) {
			return fmt.Errorf("let go of run: %w", err)
		}
	}
}
