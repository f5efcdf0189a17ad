package drive

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
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/lease"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// failed closes the attempt as failed: tried again within the policy, else the step has failed for good.
func (d *Driver) failed(ctx context.Context, h *lease.Run, state string, e *saga.StepError) (bool, error) {
	policy := h.Step().Retry
	if h.Run.Phase == runs.Undo {
		policy = h.Step().UndoRetry
	}
	failures := h.Run.Attempts + 1
	outOfTime := policy.Within > 0 && h.Attempt.StartedAt.Sub(h.Run.TriedSince) >= policy.Within
	// An undo is always worth another try: only its policy or a Final error ends it.
	final := failures >= policy.Attempts || outOfTime || e.Final || (!e.Retryable && h.Run.Phase == runs.Do)
	if final {
		return d.exhausted(ctx, h, state, e)
	}
	after := max(policy.Wait(failures), e.After)
	run := runs.Waiting
	if h.Run.Phase == runs.Undo {
		run = runs.Compensating
	}
	why := fmt.Sprintf("%s the step %q failed (%s: %s); attempt %d of %d follows in %s", direction(h), h.Attempt.Name,
		names.Of(e.Reason), e.Public, failures+1, policy.Attempts, after.Round(time.Millisecond))
	at, level := h.Attempt, d.levelOf(ctx, h, e)
	err := d.submit(ctx, &transition{h: h, cl: closing{state: state, err: e}, release: &release{
		state: run, attempts: failures, after: after, why: why, point: "park", passOver: state == runs.AttemptAbandoned,
	}})
	if err == nil {
		d.logFailure(ctx, h, &at, e, level, false)
		d.due(after)
	}
	return d.stepFailure(err, h)
}

// levelOf returns the level at which a failure is logged. A step that a later operation of its workspace superseded is
// logged at info if the database has that operation. After a rollback the database may lack operations that a resource
// has seen, and the failure is a warning.
func (d *Driver) levelOf(ctx context.Context, h *lease.Run, e *saga.StepError) slog.Level {
	switch e.Reason { //nolint:exhaustive // every other failure is a warning
	case commonv1.Reason_REASON_TASK_SUPERSEDED, commonv1.Reason_REASON_EPOCH_SUPERSEDED,
		commonv1.Reason_REASON_FENCED_OUT:
		later, err := pg.Value[bool](ctx, d.core.DB(), knowsLater, h.Run.WorkspaceID, h.Run.OpLast, h.Run.Epoch)
		if err == nil && later {
			return slog.LevelInfo
		}
	}
	return slog.LevelWarn
}

// logFailure logs a failure with its cause, once the failure is committed.
func (d *Driver) logFailure(ctx context.Context, h *lease.Run, at *runs.Attempt, e *saga.StepError, level slog.Level,
	forGood bool,
) {
	d.log.Log(ctx, level, "step failed", slog.Bool("for_good", forGood), slog.String(obs.KeyWorkflowID, h.Run.ID),
		slog.String(obs.KeyWorkspaceID, h.Run.WorkspaceID), slog.String(obs.KeyTenantID, h.Run.TenantID),
		slog.String(obs.KeyCorrelationID, h.Run.CorrelationID), slog.String("step", at.Name),
		slog.String("direction", at.Dir), slog.Int("attempt", at.Attempt),
		slog.String("error_layer", layerName(e)),
		slog.String(obs.KeyReason, names.Of(e.Reason)),
		obs.Err(e))
}

func direction(h *lease.Run) string {
	if h.Run.Phase == runs.Undo {
		return "undoing"
	}
	return "doing"
}

// exhausted ends the forward phase, or makes the run stuck in the backward one, and in both if its definition Sticks. A
// run that no driver can read becomes stuck without a driver: see quarantine of package lease.
func (d *Driver) exhausted(ctx context.Context, h *lease.Run, state string, e *saga.StepError) (bool, error) {
	at, level := h.Attempt, d.levelOf(ctx, h, e)
	more, err := d.exhaust(ctx, h, state, e)
	if err == nil {
		d.logFailure(ctx, h, &at, e, level, true)
	}
	return more, err
}

// exhaust is exhausted without the log.
func (d *Driver) exhaust(ctx context.Context, h *lease.Run, state string, e *saga.StepError) (bool, error) {
	if h.Run.Phase == runs.Do && !h.Def.Sticks {
		return d.giveUp(ctx, h, state, e)
	}
	reason := fmt.Sprintf("undo_exhausted: %s the step %q failed %d times (%s: %s)", direction(h), h.Attempt.Name,
		h.Run.Attempts+1, names.Of(e.Reason), e.Public)
	var rows saga.Writes
	if h.Def.OnStuck != nil {
		workspaceID := h.Run.WorkspaceID
		if h.Def.BeforeStuck != nil {
			rows.Before = append(rows.Before,
				func(ctx context.Context, tx pgx.Tx) error { return h.Def.BeforeStuck(ctx, tx, workspaceID) })
		}
		rows.Rows = append(
			rows.Rows, func(ctx context.Context, tx pgx.Tx) error { return h.Def.OnStuck(ctx, tx, workspaceID, e) },
		)
	}
	err := d.submit(ctx, &transition{h: h, cl: closing{state: state, err: e}, release: &release{
		rows: rows, state: runs.Stuck, attempts: h.Run.Attempts + 1, why: "waiting for an operator: retry-undo or skip-undo",
		stuck: reason, workspace: runs.Stuck, passOver: true, keepError: h.Run.Phase == runs.Do, point: "finish",
	}})
	if err == nil {
		d.core.Stats().Stuck.Add(1)
	}
	return d.stepFailure(err, h)
}

// giveUp leaves the forward phase because of an error: it compensates, or, if the step retains, ends as failed with
// every claim kept.
func (d *Driver) giveUp(ctx context.Context, h *lease.Run, state string, e *saga.StepError) (bool, error) {
	cl := closing{state: state, err: e}
	if h.Step().Retain {
		err := d.submit(ctx, &transition{h: h, cl: cl, release: &release{
			state: runs.Failed, workspace: names.Of(h.Def.States.Failed), keepError: true,
			point: "finish",
		}})
		if err == nil {
			d.core.Stats().Failed.Add(1)
		}
		return d.stepFailure(err, h)
	}
	return d.compensate(ctx, h, cl, state == runs.AttemptAbandoned)
}

// cancelled leaves the forward phase because the run was cancelled.
func (d *Driver) cancelled(ctx context.Context, h *lease.Run, state string, abandoned bool) (bool, error) {
	by := h.Run.CancelBy
	if h.Run.CancelAt == nil {
		// The heartbeat saw the cancel; this copy of the row is older.
		now, err := runs.Get(ctx, d.core.DB(), h.Run.ID)
		if err != nil {
			return false, err
		}
		if now.Fence != h.Run.Fence {
			return false, saga.ErrFenced
		}
		by = now.CancelBy
	}
	e := &saga.StepError{
		Layer: commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW, Reason: commonv1.Reason_REASON_CANCEL_REQUESTED,
		Public: "cancelled by " + by,
	}
	return d.compensate(ctx, h, closing{state: state, err: e}, abandoned)
}

// compensate begins the compensation. An abandoned step may still be running: the fence is raised, so that its writes
// are refused.
func (d *Driver) compensate(ctx context.Context, h *lease.Run, cl closing, abandoned bool) (bool, error) {
	if abandoned {
		d.core.Stats().Abandoned.Add(1)
	}
	from, err := d.undoFrom(ctx, h)
	if err != nil {
		return false, err
	}
	if from < 0 {
		err := d.submit(ctx, &transition{h: h, cl: cl, release: &release{
			state: runs.Failed, workspace: names.Of(h.Def.States.Failed), passOver: true,
			keepError: true, point: "finish",
		}})
		if err == nil {
			d.core.Stats().Failed.Add(1)
		}
		return d.stepFailure(err, h)
	}
	n := nextAttempt{step: from, phase: runs.Undo, bumpFence: abandoned, passOver: true, keepError: true}
	return d.committed(d.submit(ctx, &transition{h: h, cl: cl, attempt: &n}), h)
}
