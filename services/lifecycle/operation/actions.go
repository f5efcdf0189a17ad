package operation

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
	"github.com/gpuaas/mesh/services/lifecycle/rollback"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/tenants"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

var clockNow = pg.Define(pg.RoleLifecycle, "operation.clock_now", `SELECT mesh.clock()`)

// GetActions returns which verbs are possible now, and why the others are not.
func (s *Server) GetActions(ctx context.Context, req *lifecyclev1.GetActionsRequest) (*lifecyclev1.GetActionsResponse,
	error,
) {
	res := &lifecyclev1.GetActionsResponse{}
	err := pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		w, err := tenants.Workspace(ctx, tx, req.GetWorkspaceId())
		if err != nil {
			return err
		}
		if res.Actions, err = s.options(ctx, tx, w, false, false); err != nil {
			return err
		}
		if err := rollback.Refuse(ctx, tx); fault.Has(err, commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK) {
			for _, o := range res.GetActions() {
				o.Possible, o.Reason, o.Unmet = false, commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK,
					slices.Concat(fault.From(err).Unmet, o.GetUnmet())
			}
		} else if err != nil {
			return err
		}
		at, err := pg.Value[time.Time](ctx, tx, clockNow)
		if err != nil {
			return fmt.Errorf("read clock: %w", err)
		}
		res.ComputedAt = timestamppb.New(at)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return res, nil
}

// condition is one thing that must hold for a verb, and the reason with which the verb is refused if it does not.
type condition struct {
	holds  bool
	text   string
	reason commonv1.Reason
}

// options computes every verb from the workspace and its open run. It is the one source for command line and console. A
// verb that is not possible has the reason with which a request for it would be refused: that of the first condition
// that is unmet.
func (s *Server) options(ctx context.Context, tx pgx.Tx, w workspace.Row, proven,
	override bool,
) ([]*lifecyclev1.ActionOption, error) {
	run, open, err := runs.Live(ctx, tx, w.ID)
	if err != nil {
		return nil, err
	}
	const unmet, inProgress, isStuck = commonv1.Reason_REASON_PRECONDITION_FAILED,
		commonv1.Reason_REASON_OPERATION_IN_PROGRESS, commonv1.Reason_REASON_RUN_STUCK
	stuck := open && run.State == "stuck"
	undoing := open && run.State == "compensating"
	isOpen := saga.IsOpen(&run)
	held := inProgress
	if stuck {
		held = isStuck
	}
	failed := condition{w.State == "failed", "the workspace is " + w.State + ", not failed", unmet}
	limit := s.deps.Policy.Current().SagaRetryLimit()
	retry := []condition{{!open, isOpen, held}, failed}
	if err := s.roomForRetry(ctx, tx, w); err != nil {
		f, ok := fault.As(err)
		if !ok {
			return nil, err
		}
		for _, u := range f.Unmet {
			retry = append(retry, condition{false, u, f.Reason})
		}
	}
	retry = append(retry, condition{
		w.ResetDone || w.State != "failed", "the workspace has not been reset since it failed",
		commonv1.Reason_REASON_NOT_RESET,
	}, condition{
		w.RetryUsed < limit || override,
		fmt.Sprintf("%d of %d retries are used: another needs an override with a reason", w.RetryUsed, limit),
		commonv1.Reason_REASON_RETRY_LIMIT_REACHED,
	})
	again, err := retryConsequence(ctx, tx, w, run, open)
	if err != nil {
		return nil, err
	}
	option := func(kind commonv1.OperationKind, consequence string, conditions ...condition) *lifecyclev1.ActionOption {
		o := &lifecyclev1.ActionOption{Kind: kind, Possible: true, Consequence: consequence}
		for _, c := range conditions {
			if c.holds {
				continue
			}
			if o.GetPossible() {
				o.Possible, o.Reason = false, c.reason
			}
			o.Unmet = append(o.Unmet, c.text)
		}
		return o
	}
	recreate, err := s.recreateOption(ctx, tx, w, run, open, proven)
	if err != nil {
		return nil, err
	}
	if text, ok := joinsInstead(run, open); ok {
		recreate.Consequence = text
	}
	releases, err := s.releaseOptions(ctx, tx, w)
	if err != nil {
		return nil, err
	}
	known := condition{!stuck || s.deps.Core.Drives(&run), "this build does not know the steps of the operation", unmet}
	endable := w.State == "active" || w.State == "failed" || w.State == "stuck"
	return append([]*lifecyclev1.ActionOption{
		option(kCancel, "stops the step under way and undoes what was made, in reverse; the workspace ends failed",
			condition{open, "no operation is open to cancel", unmet},
			condition{!stuck, "the operation is stuck: its undo has failed", isStuck},
			condition{!undoing, "the operation is being undone already", unmet},
			condition{
				!open || s.deps.Core.Cancellable(&run),
				"the open operation is a " + run.Kind + ", which cannot be cancelled", unmet,
			}),
		option(kReset, "archives the history of the runs and keeps what they made, so that a retry adopts it",
			condition{!open, isOpen, unmet}, failed),
		option(kRetry, again, retry...),
		option(kRetryUndo, "tries the undo that is exhausted again",
			condition{stuck, "no operation of the workspace is stuck", unmet}, known),
		option(kSkipUndo, "leaves what cannot be undone as an orphan claim and goes on",
			condition{stuck, "no operation of the workspace is stuck", unmet}, known),
		recreate,
		option(kDecommission, "removes workloads, schema, handle, storage and instance, for good",
			condition{!open || stuck, isOpen + ": cancel it first", inProgress},
			condition{endable || open, "the workspace is " + w.State +
				": one that is active, failed or stuck can be decommissioned", unmet}),
	}, releases...), nil
}

// joinsInstead returns the consequence of a request for an operation that is under way already, which joins it, and
// false if the request would be refused.
func joinsInstead(run runs.Run, open bool) (string, bool) {
	if !open || !joinable(run) {
		return "", false
	}
	return fmt.Sprintf("begins nothing: it joins operation %s (%s), which is under way", run.ID, run.Kind), true
}

// retryConsequence returns what a retry would do, and what the operator should consider before it.
func retryConsequence(ctx context.Context, tx pgx.Tx, w workspace.Row, run runs.Run, open bool) (string, error) {
	if text, ok := joinsInstead(run, open); ok {
		return text, nil
	}
	const first = "provisions again under the same id and adopts what is there"
	if w.State != names.Of(commonv1.WorkspaceState_WORKSPACE_STATE_FAILED) {
		return first, nil
	}
	claims, err := claims.Live(ctx, tx, w.ID)
	if err != nil {
		return "", err
	}
	advice, err := saga.RetryAdvice(ctx, tx, w.ID)
	if err != nil {
		return "", err
	}
	kinds := make([]string, 0, len(claims))
	for _, c := range claims {
		if !slices.Contains(kinds, c.Kind) {
			kinds = append(kinds, c.Kind)
		}
	}
	out := first + ": " + strings.Join(kinds, ", ")
	if len(kinds) == 0 {
		out = "provisions again under the same id, in the next epoch; nothing is left that it could adopt"
	}
	if advice != "" {
		out += ". " + advice
	}
	return out, nil
}
