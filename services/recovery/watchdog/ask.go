package watchdog

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/churn"
	"github.com/gpuaas/mesh/services/recovery/fleet"
)

// joinedAgain is how long after a join the request to lifecycle is repeated for an instance that does not come, since
// lifecycle's record of the instance may lag behind.
const joinedAgain = time.Minute

// reasonMost bounds the reason of a request.
const reasonMost = 500

// request asks lifecycle to recreate the workspace of a record whose request is stored, and stores the answer. If a
// request is sent twice, lifecycle answers the same key with the same operation.
func (w *Watchdog) request(ctx context.Context, r *record) error {
	ctx = obs.With(ctx, obs.Correlation{
		CorrelationID: r.CorrelationID, TenantID: r.TenantID, WorkspaceID: r.WorkspaceID,
		NodeID: r.NodeID,
	})
	if err := failpoint.Hit("recovery.watchdog.before_request"); err != nil {
		return err
	}
	call, cancel := context.WithTimeout(ctx, w.cfg.Timeout)
	reason := []rune(names.Of(r.Trigger) + ": " + r.Cause)
	resp, err := w.deps.Lifecycle.RequestOperation(call, &lifecyclev1.RequestOperationRequest{
		Kind:   commonv1.OperationKind_OPERATION_KIND_RECREATE,
		Target: &lifecyclev1.RequestOperationRequest_WorkspaceId{WorkspaceId: r.WorkspaceID}, Requester: r.requester(),
		IdempotencyKey: r.key(), Reason: string(reason[:min(len(reason), reasonMost)]), CorrelationId: r.CorrelationID,
		ExpectedEpoch: r.AskedEpoch,
	})
	cancel()
	if ctx.Err() != nil {
		return nil //nolint:nilerr // asked to stop: the replica that acts next asks again
	}
	if hit := failpoint.Hit("recovery.watchdog.after_request"); hit != nil {
		return hit
	}
	if writeErr := w.answer(ctx, r, resp.GetOperation(), err); writeErr != nil {
		if errors.Is(writeErr, errMoved) {
			return nil // another replica has stored the same answer
		}
		return fmt.Errorf("write answer of recovery %s: %w", r.ID, writeErr)
	}
	return nil
}

// answer stores lifecycle's answer to a request.
func (w *Watchdog) answer(ctx context.Context, sent *record, op *lifecyclev1.Operation, refusal error) error {
	var before record
	var r *record
	err := pg.InTx(ctx, w.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		if r, err = readRecord(ctx, tx, sent.ID); err != nil {
			return err
		}
		before = *r
		if r.EndedAt != nil || r.Asked != sent.Asked || !r.pending() {
			return errMoved
		}
		now, err := fleet.Clock(ctx, tx)
		if err != nil {
			return err
		}
		if refusal != nil {
			return w.refused(ctx, tx, r, refusal, now)
		}
		r.Answered, r.Refusals = r.Asked, 0
		r.OperationID, r.Following = op.GetOperationId(), true
		r.proceed()
		if op.GetJoined() {
			// The request joined an operation, so no instance was launched for it.
			if err := churn.GiveBack(ctx, tx, r.target()); err != nil {
				return err
			}
			if op.GetOperationId() == r.RunID {
				r.Withheld, r.WithheldBy = "the stalled operation still owns the workspace and was joined: it is not fought; "+
					"cancel it, or wait for its deadline", withheldByOwner
				if r.Step == instanceStep || r.Trigger == triggerRegister {
					next := now.Add(min(joinedAgain, w.cfg.RefusedMost))
					r.NextAt = &next
				}
			}
		} else {
			r.Attempts++
		}
		w.deps.Logger.InfoContext(ctx, "recovery asked for", slog.String("operation", op.GetOperationId()),
			slog.String("kind", names.Of(op.GetKind())),
			slog.Bool("joined", op.GetJoined()))
		return saveRecords(ctx, tx, r)
	})
	if err != nil {
		return err
	}
	w.metrics.asked.WithLabelValues(answerOf(op, refusal)).Inc()
	count(w.metrics.moved(&before, r))
	return nil
}

// answerOf returns the metric label of an answer.
func answerOf(op *lifecyclev1.Operation, refusal error) string {
	switch {
	case refusal != nil && !answered(fault.From(refusal).Reason):
		return answerUnanswered
	case refusal != nil:
		return answerRefused
	case op.GetJoined():
		return answerJoined
	}
	return answerStarted
}

// refused stores a refusal. If lifecycle has decided, the recovery is withheld; if it has not answered, the request
// stays open and is sent again.
func (w *Watchdog) refused(ctx context.Context, tx pgx.Tx, r *record, refusal error, now time.Time) error {
	r.Refusals++
	f := fault.From(refusal)
	next := now.Add(max(f.RetryAfter, min(w.cfg.RefusedFirst<<min(r.Refusals-1, 10), w.cfg.RefusedMost)))
	if !answered(f.Reason) {
		r.NextAt = &next
		w.deps.Logger.WarnContext(ctx, "lifecycle does not answer a recovery", obs.Err(refusal))
		return saveRecords(ctx, tx, r)
	}
	// The idempotency key was not used up: the next request has the same key.
	r.Asked--
	if err := churn.GiveBack(ctx, tx, r.target()); err != nil {
		return err
	}
	if f.Reason == commonv1.Reason_REASON_NOT_FOUND {
		r.Cause += "; lifecycle does not know the workspace"
		r.end(outcomeFailed, "", now)
		return saveRecords(ctx, tx, r)
	}
	because := names.Of(f.Reason) + ": " + f.Public
	if f.Reason == commonv1.Reason_REASON_CONFLICT {
		// The instance that the request was about has been replaced. Its replacement is evaluated when its events have come,
		// and ends the record if it serves.
		because, r.Refusals = "another request came first: "+because, 0
	}
	r.withhold(withheldByOwner, because, &next)
	w.deps.Logger.InfoContext(ctx, "recovery withheld", slog.String(obs.KeyReason, names.Of(f.Reason)))
	return saveRecords(ctx, tx, r)
}

// answered reports whether a reason is a decision of lifecycle, and not a missing answer.
func answered(reason commonv1.Reason) bool {
	switch reason { //nolint:exhaustive // everything else was decided
	case commonv1.Reason_REASON_UNAVAILABLE, commonv1.Reason_REASON_DEADLINE_EXCEEDED, commonv1.Reason_REASON_INTERNAL,
		commonv1.Reason_REASON_UNSPECIFIED, commonv1.Reason_REASON_UNAUTHENTICATED, commonv1.Reason_REASON_RATE_LIMITED:
		return false
	}
	return true
}
