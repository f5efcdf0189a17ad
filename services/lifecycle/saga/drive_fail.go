package saga

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// failed closes the attempt as failed: tried again within the policy, else the step has failed for good.
func (d *Driver) failed(ctx context.Context, h *leasedRun, state string, e *StepError) (bool, error) {
	policy := h.step().Retry
	if h.run.Phase == runs.Undo {
		policy = h.step().UndoRetry
	}
	failures := h.run.Attempts + 1
	outOfTime := policy.Within > 0 && h.attempt.StartedAt.Sub(h.run.TriedSince) >= policy.Within
	// An undo is always worth another try: only its policy or a Final error ends it.
	final := failures >= policy.Attempts || outOfTime || e.Final || (!e.Retryable && h.run.Phase == runs.Do)
	if final {
		return d.exhausted(ctx, h, state, e)
	}
	after := max(policy.wait(failures), e.After)
	run := runs.Waiting
	if h.run.Phase == runs.Undo {
		run = runs.Compensating
	}
	why := fmt.Sprintf("%s the step %q failed (%s: %s); attempt %d of %d follows in %s", direction(h), h.attempt.Name,
		names.Of(e.Reason), e.Public, failures+1, policy.Attempts, after.Round(time.Millisecond))
	at, level := h.attempt, d.levelOf(ctx, h, e)
	err := d.release(ctx, h, closing{state: state, err: e}, rest{
		state: run, attempts: failures, after: after, why: why, point: "park", passOver: state == runs.AttemptAbandoned,
	})
	if err == nil {
		d.tell(ctx, h, &at, e, level, false)
		d.due(after)
	}
	return d.ended(err, h)
}

// levelOf returns the level at which a failure is logged. A step that a later operation of its workspace superseded is
// logged at info if the database has that operation. After a rollback the database may lack operations that a resource
// has seen, and the failure is a warning.
func (d *Driver) levelOf(ctx context.Context, h *leasedRun, e *StepError) slog.Level {
	switch e.Reason { //nolint:exhaustive // every other failure is a warning
	case commonv1.Reason_REASON_TASK_SUPERSEDED, commonv1.Reason_REASON_EPOCH_SUPERSEDED,
		commonv1.Reason_REASON_FENCED_OUT:
		later, err := pg.Value[bool](ctx, d.core.db, knowsLater, h.run.WorkspaceID, h.run.OpLast, h.run.Epoch)
		if err == nil && later {
			return slog.LevelInfo
		}
	}
	return slog.LevelWarn
}

// tell logs a failure with its cause, once the failure is committed.
func (d *Driver) tell(ctx context.Context, h *leasedRun, at *runs.Attempt, e *StepError, level slog.Level,
	forGood bool,
) {
	d.log.Log(ctx, level, "step failed", slog.Bool("for_good", forGood), slog.String(obs.KeyWorkflowID, h.run.ID),
		slog.String(obs.KeyWorkspaceID, h.run.WorkspaceID), slog.String(obs.KeyTenantID, h.run.TenantID),
		slog.String(obs.KeyCorrelationID, h.run.CorrelationID), slog.String("step", at.Name),
		slog.String("direction", at.Dir), slog.Int("attempt", at.Attempt),
		slog.String("error_layer", layerName(e)),
		slog.String(obs.KeyReason, names.Of(e.Reason)),
		obs.Err(e))
}

func direction(h *leasedRun) string {
	if h.run.Phase == runs.Undo {
		return "undoing"
	}
	return "doing"
}

// exhausted ends the forward phase, or makes the run stuck in the backward one.
func (d *Driver) exhausted(ctx context.Context, h *leasedRun, state string, e *StepError) (bool, error) {
	at, level := h.attempt, d.levelOf(ctx, h, e)
	more, err := d.exhaust(ctx, h, state, e)
	if err == nil {
		d.tell(ctx, h, &at, e, level, true)
	}
	return more, err
}

func (d *Driver) exhaust(ctx context.Context, h *leasedRun, state string, e *StepError) (bool, error) {
	if h.run.Phase == runs.Do && !h.def.Sticks {
		return d.giveUp(ctx, h, state, e)
	}
	reason := fmt.Sprintf("undo_exhausted: %s the step %q failed %d times (%s: %s)", direction(h), h.attempt.Name,
		h.run.Attempts+1, names.Of(e.Reason), e.Public)
	var rows writes
	if h.def.OnStuck != nil {
		workspaceID := h.run.WorkspaceID
		if h.def.BeforeStuck != nil {
			rows.before = append(rows.before,
				func(ctx context.Context, tx pgx.Tx) error { return h.def.BeforeStuck(ctx, tx, workspaceID) })
		}
		rows.rows = append(
			rows.rows, func(ctx context.Context, tx pgx.Tx) error { return h.def.OnStuck(ctx, tx, workspaceID, e) },
		)
	}
	err := d.release(ctx, h, closing{state: state, err: e}, rest{
		rows: rows, state: runs.Stuck, attempts: h.run.Attempts + 1, why: "waiting for an operator: retry-undo or skip-undo",
		stuck: reason, workspace: runs.Stuck, passOver: true, keepError: h.run.Phase == runs.Do, point: "finish",
	})
	if err == nil {
		d.core.stats.Stuck.Add(1)
	}
	return d.ended(err, h)
}

// giveUp leaves the forward phase because of an error: it compensates, or, if the step retains, ends as failed with
// every claim kept.
func (d *Driver) giveUp(ctx context.Context, h *leasedRun, state string, e *StepError) (bool, error) {
	cl := closing{state: state, err: e}
	if h.step().Retain {
		err := d.release(ctx, h, cl, rest{
			state: runs.Failed, workspace: names.Of(h.def.States.Failed), keepError: true,
			point: "finish",
		})
		if err == nil {
			d.core.stats.Failed.Add(1)
		}
		return d.ended(err, h)
	}
	return d.turnBack(ctx, h, cl, state == runs.AttemptAbandoned)
}

// cancelled leaves the forward phase because the run was cancelled.
func (d *Driver) cancelled(ctx context.Context, h *leasedRun, state string, abandoned bool) (bool, error) {
	by := h.run.CancelBy
	if h.run.CancelAt == nil {
		// The heartbeat saw the cancel; this copy of the row is older.
		now, err := runs.Get(ctx, d.core.db, h.run.ID)
		if err != nil {
			return false, err
		}
		if now.Fence != h.run.Fence {
			return false, ErrFenced
		}
		by = now.CancelBy
	}
	e := &StepError{
		Layer: commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW, Reason: commonv1.Reason_REASON_CANCEL_REQUESTED,
		Public: "cancelled by " + by,
	}
	return d.turnBack(ctx, h, closing{state: state, err: e}, abandoned)
}

// turnBack begins the compensation. An abandoned step may still be running: the fence is raised, so that its writes are
// refused.
func (d *Driver) turnBack(ctx context.Context, h *leasedRun, cl closing, abandoned bool) (bool, error) {
	if abandoned {
		d.core.stats.Abandoned.Add(1)
	}
	from, err := d.core.undoFrom(ctx, h)
	if err != nil {
		return false, err
	}
	if from < 0 {
		err := d.release(ctx, h, cl, rest{
			state: runs.Failed, workspace: names.Of(h.def.States.Failed), passOver: true,
			keepError: true, point: "finish",
		})
		if err == nil {
			d.core.stats.Failed.Add(1)
		}
		return d.ended(err, h)
	}
	n := nextAttempt{step: from, phase: runs.Undo, bumpFence: abandoned, passOver: true, keepError: true}
	return d.moved(d.advance(ctx, h, cl, n), h)
}
