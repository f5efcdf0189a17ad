package saga

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// ResetAdvice is how long after a cancel a refused Reset is worth trying again.
const ResetAdvice = 2 * time.Minute

// Reset makes a failed workspace ready for a Retry: its history is archived, its claims stay. It is refused while a run
// is live or an attempt is open; the fault names them.
func (c *Core) Reset(ctx context.Context, tx pgx.Tx, workspaceID string) (workspace.Row, string, error) {
	live, found, err := runs.Live(ctx, tx, workspaceID)
	if err != nil {
		return workspace.Row{}, "", err
	}
	if found {
		return workspace.Row{}, "", fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
			"something still runs on this workspace", fault.Conflicting(live.ID),
			fault.Unmet(fmt.Sprintf("%s at the step %q: %s", IsOpen(&live), live.StepName(), live.WhyWaiting)),
			fault.RetryAfter(ResetAdvice), fault.Remedy(c.endRemedy(&live)))
	}
	open, err := openAttempts(ctx, tx, workspaceID)
	if err != nil {
		return workspace.Row{}, "", err
	}
	if len(open) > 0 {
		return workspace.Row{}, "", fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
			"an attempt is still open on this workspace", fault.Unmet(open...), fault.RetryAfter(ResetAdvice),
			fault.Remedy("ask again after the given time; if it still is open, cancel again"))
	}
	// A run's row is locked before its workspace's. If the workspace is not to be reset, the caller rolls this back, or
	// there was nothing to archive.
	if _, err := pg.Exec(ctx, tx, archiveRuns, workspaceID); err != nil {
		return workspace.Row{}, "", fmt.Errorf("archive runs: %w", err)
	}
	reset, err := workspace.Reset(ctx, tx, workspaceID)
	if err != nil {
		return workspace.Row{}, "", err
	}
	if !reset {
		w, err := workspace.Get(ctx, tx, workspaceID)
		if err != nil {
			return workspace.Row{}, "", err
		}
		if w.ResetDone {
			return w, "", nil
		}
		return workspace.Row{}, "", fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "only a failed workspace is reset",
			notFailed(w.State)...)
	}
	return workspace.Announce(ctx, tx, workspaceID)
}

// openAttempts describes the attempts at a workspace that have not ended, at most ten, one text each.
func openAttempts(ctx context.Context, tx pgx.Tx, workspaceID string) ([]string, error) {
	out, err := pg.Values[string](ctx, tx, listOpenAttempts, workspaceID)
	if err != nil {
		return nil, fmt.Errorf("list open attempts: %w", err)
	}
	return out, nil
}

// RetryRequest is a request for a new run after a Reset.
type RetryRequest struct {
	WorkspaceID   string
	Definition    string
	Input         any // nil takes the former run's
	Requester     string
	CorrelationID string
	Limit         int // retries until an hour of health; zero means 3
	Override      bool
	Reason        string // required with Override
	// EpochClaim is the claim kind whose presence keeps the epoch; empty means `instance`.
	EpochClaim string
}

// Retried is the result of a Retry.
type Retried struct {
	Started
	Used   int
	Advice string // not empty if the same step failed with the same code twice
}

// Retry starts a new run of a failed workspace that was reset. The run adopts the existing claims, and the epoch stays
// the same while there is a live claim of the kind EpochClaim. One retry more than Limit within the window is refused
// unless overridden with a reason.
func (c *Core) Retry(ctx context.Context, tx pgx.Tx, req RetryRequest) (Retried, error) {
	if req.Limit == 0 {
		req.Limit = 3
	}
	if req.EpochClaim == "" {
		req.EpochClaim = "instance"
	}
	if live, found, err := runs.Live(ctx, tx, req.WorkspaceID); err != nil {
		return Retried{}, err
	} else if found {
		started, err := c.join(ctx, tx, StartRequest{
			WorkspaceID: req.WorkspaceID, Kind: commonv1.OperationKind_OPERATION_KIND_RETRY,
			JoinKinds: []commonv1.OperationKind{
				commonv1.OperationKind_OPERATION_KIND_CREATE,
				commonv1.OperationKind_OPERATION_KIND_RECREATE,
			},
		}, &live)
		return Retried{Started: started}, err
	}
	w, err := workspace.Get(ctx, tx, req.WorkspaceID)
	if err != nil {
		return Retried{}, err
	}
	switch {
	case w.State != runs.Failed:
		return Retried{}, fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "only a failed workspace is retried",
			notFailed(w.State)...)
	case !w.ResetDone:
		return Retried{}, fault.New(commonv1.Reason_REASON_NOT_RESET, "",
			fault.Unmet("the workspace has not been reset since it failed"))
	case w.RetryUsed >= req.Limit && !req.Override:
		return Retried{}, fault.New(commonv1.Reason_REASON_RETRY_LIMIT_REACHED,
			fmt.Sprintf("%d retries have been used", w.RetryUsed),
			fault.Unmet(fmt.Sprintf("%d of %d retries are used", w.RetryUsed, req.Limit)),
			fault.Remedy("the cause does not pass by itself: decommission the workspace and create it anew, or retry with "+
				"--override and --reason, which go on record"))
	case req.Override && req.Reason == "":
		return Retried{}, fault.New(commonv1.Reason_REASON_REASON_REQUIRED, "")
	}
	former, err := formerRuns(ctx, tx, req.WorkspaceID)
	if err != nil {
		return Retried{}, err
	}
	if len(former) == 0 {
		return Retried{}, fmt.Errorf("retry workspace %s: it has no run", req.WorkspaceID)
	}
	live, err := claims.Live(ctx, tx, req.WorkspaceID, req.EpochClaim)
	if err != nil {
		return Retried{}, err
	}
	if req.Input == nil {
		req.Input = former[0].Input
	}
	started, err := c.Start(ctx, tx, StartRequest{
		WorkspaceID: req.WorkspaceID, Kind: commonv1.OperationKind_OPERATION_KIND_RETRY, Definition: req.Definition,
		Input: req.Input, Requester: req.Requester, CorrelationID: req.CorrelationID,
		From: []commonv1.WorkspaceState{commonv1.WorkspaceState_WORKSPACE_STATE_FAILED}, NextEpoch: len(live) == 0,
		Round: former[0].Round + 1, ParentRunID: former[0].ID, countRetry: true,
		retryUsed: w.RetryUsed,
	})
	out := Retried{Started: started, Used: w.RetryUsed + 1}
	out.Advice = adviceAfter(former)
	return out, err
}

// RetryAdvice returns the advice that a Retry of the workspace would return. It is empty unless the last two runs
// failed at the same step with the same code.
func RetryAdvice(ctx context.Context, tx pgx.Tx, workspaceID string) (string, error) {
	former, err := formerRuns(ctx, tx, workspaceID)
	return adviceAfter(former), err
}

func adviceAfter(former []runs.Run) string {
	if len(former) < 2 || former[0].ErrorCode == "" || former[0].ErrorCode != former[1].ErrorCode ||
		former[0].ErrorStep != former[1].ErrorStep {
		return ""
	}
	at := stepNameAt(&former[0], former[0].ErrorStep)
	if former[0].ErrorCode == names.Of(commonv1.Reason_REASON_CANCEL_REQUESTED) {
		return fmt.Sprintf("it was cancelled at the step %q twice: if it stalls there again, decommission it and create "+
			"it anew", at)
	}
	return fmt.Sprintf("the step %q failed with %s twice: if it fails again, decommission the workspace and create "+
		"it anew", at, former[0].ErrorCode)
}

// notFailed returns the unmet condition of a verb that needs a failed workspace, and a remedy for the present state.
func notFailed(state string) []fault.Option {
	remedy := "`gpuaas workspaces actions WS` shows what is possible now"
	switch state {
	case names.Of(commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE):
		remedy = "it has been provisioned: to make it anew, recreate it; to end it, decommission it"
	case names.Of(commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED):
		remedy = "it is over: create it anew"
	}
	return []fault.Option{fault.Unmet("the workspace is " + state + ", not failed"), fault.Remedy(remedy)}
}

func stepNameAt(r *runs.Run, step int) string {
	if step < 0 || step >= len(r.StepNames) {
		return ""
	}
	return r.StepNames[step]
}

func formerRuns(ctx context.Context, tx pgx.Tx, workspaceID string) ([]runs.Run, error) {
	out, err := pg.All[runs.Run](ctx, tx, formerRunsOf, workspaceID)
	if err != nil {
		return nil, fmt.Errorf("read former runs: %w", err)
	}
	return out, nil
}
