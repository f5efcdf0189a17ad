package saga

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
)

// ResetAdvice is how long after a cancel a refused Reset is worth trying again.
const ResetAdvice = 2 * time.Minute

// Verb is the result of an operator's verb on a run.
type Verb struct {
	Run     Run
	Changed bool   // false: the run was in that state already
	Pos     string // position token; empty if nothing changed
}

// Cancel requests that a run be stopped and undone, and that agents stop the tasks of its steps. It returns at once:
// the driver cancels the step's context, waits for the grace, and compensates. A run that is cancelled or compensates
// already is left as it is; one that is stuck, has succeeded or has failed, or whose definition is Uncancellable, is
// refused, and tx is to be rolled back.
func (c *Core) Cancel(ctx context.Context, tx pgx.Tx, runID, by, reason string) (Verb, error) {
	if err := c.withdrawTasks(ctx, tx, runID); err != nil {
		return Verb{}, err
	}
	r, err := lockRun(ctx, tx, runID)
	if err != nil {
		return Verb{}, err
	}
	def, known := c.registry.Get(r.Definition, r.DefVersion)
	switch {
	case r.State == stateCompensating, r.CancelAt != nil && r.Live() && r.State != stateStuck:
		return Verb{Run: *r}, nil
	case r.State == stateStuck:
		return Verb{}, c.stuckFault(r)
	case r.State == stateSucceeded:
		return Verb{}, fault.New(commonv1.Reason_REASON_STATE_TERMINAL, "the operation has succeeded",
			fault.Remedy("decommission the workspace instead"),
			fault.Unmet("the operation has succeeded"))
	case r.State == stateFailed:
		return Verb{}, fault.New(commonv1.Reason_REASON_STATE_TERMINAL, "the operation has ended already",
			fault.Unmet("the operation has failed"))
	case known && def.Uncancellable:
		return Verb{}, fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, r.Kind+" cannot be cancelled",
			fault.Conflicting(r.ID),
			fault.Unmet("the open operation is a "+r.Kind+", which cannot be cancelled"),
			fault.Remedy("wait until it has ended, or is stuck"))
	}
	*r, err = pg.One[Run](ctx, tx, cancelRun, r.ID, by, reason)
	if err != nil {
		return Verb{}, fmt.Errorf("cancel run: %w", err)
	}
	c.asked.Store(true)
	c.makesDue(tx)
	return c.withWorkspace(ctx, tx, r, names.Of(commonv1.WorkspaceState_WORKSPACE_STATE_CANCELLING),
		names.Of(commonv1.Reason_REASON_CANCEL_REQUESTED), reason)
}

// withdrawTasks requests that agents stop the tasks of a run's steps. It is called before the run's row is locked.
func (c *Core) withdrawTasks(ctx context.Context, tx pgx.Tx, runID string) error {
	if c.withdraw == nil {
		return nil
	}
	if err := c.withdraw(ctx, tx, runID, "the operation is being cancelled"); err != nil {
		return fmt.Errorf("withdraw tasks of run %s: %w", runID, err)
	}
	return nil
}

// Amend replaces the input of a run that is at the given step of its forward phase. The step reads it when its function
// is called next, which is at once if the step is parked with WakeOnSignal. It returns a conflict if the run is no
// longer at that step, or is being cancelled.
func (c *Core) Amend(ctx context.Context, tx pgx.Tx, runID, step string, input any) (Verb, error) {
	raw, err := json.Marshal(input)
	if err != nil {
		return Verb{}, fmt.Errorf("amend run: marshal input: %w", err)
	}
	r, err := pg.One[Run](ctx, tx, amendRun, runID, step, raw)
	if pg.IsNoRows(err) {
		return Verb{}, fault.New(commonv1.Reason_REASON_CONFLICT, "the operation went on meanwhile")
	}
	if err != nil {
		return Verb{}, fmt.Errorf("amend run: %w", err)
	}
	c.makesDue(tx)
	var j eventBuffer
	j.run(&r)
	pos, err := j.flushPos(ctx, tx)
	return Verb{Run: r, Changed: true, Pos: pos}, err
}

// Reset makes a failed workspace ready for a Retry: its history is archived, its claims stay. It is refused while a run
// is live or an attempt is open; the fault names them.
func (c *Core) Reset(ctx context.Context, tx pgx.Tx, workspaceID string) (Workspace, string, error) {
	live, found, err := LiveRun(ctx, tx, workspaceID)
	if err != nil {
		return Workspace{}, "", err
	}
	if found {
		return Workspace{}, "", fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
			"something still runs on this workspace", fault.Conflicting(live.ID),
			fault.Unmet(fmt.Sprintf("%s at the step %q: %s", IsOpen(&live), live.StepName(), live.WhyWaiting)),
			fault.RetryAfter(ResetAdvice), fault.Remedy(c.endRemedy(&live)))
	}
	open, err := openAttempts(ctx, tx, workspaceID)
	if err != nil {
		return Workspace{}, "", err
	}
	if len(open) > 0 {
		return Workspace{}, "", fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
			"an attempt is still open on this workspace", fault.Unmet(open...), fault.RetryAfter(ResetAdvice),
			fault.Remedy("ask again after the given time; if it still is open, cancel again"))
	}
	// A run's row is locked before its workspace's. If the workspace is not to be reset, the caller rolls this back, or
	// there was nothing to archive.
	if _, err := pg.Exec(ctx, tx, archiveRuns, workspaceID); err != nil {
		return Workspace{}, "", fmt.Errorf("archive runs: %w", err)
	}
	tag, err := pg.Exec(ctx, tx, resetWorkspace, workspaceID)
	if err != nil {
		return Workspace{}, "", fmt.Errorf("reset workspace: %w", err)
	}
	if tag.RowsAffected() == 0 {
		w, err := GetWorkspace(ctx, tx, workspaceID)
		if err != nil {
			return Workspace{}, "", err
		}
		if w.ResetDone {
			return w, "", nil
		}
		return Workspace{}, "", fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "only a failed workspace is reset",
			notFailed(w.State)...)
	}
	return AnnounceWorkspace(ctx, tx, workspaceID)
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
	if live, found, err := LiveRun(ctx, tx, req.WorkspaceID); err != nil {
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
	w, err := GetWorkspace(ctx, tx, req.WorkspaceID)
	if err != nil {
		return Retried{}, err
	}
	switch {
	case w.State != stateFailed:
		return Retried{}, fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "only a failed workspace is retried",
			notFailed(w.State)...)
	case !w.ResetDone:
		return Retried{}, fault.New(commonv1.Reason_REASON_NOT_RESET, "",
			fault.Unmet("the workspace has not been reset since it failed"))
	case w.RetryUsed >= req.Limit && !req.Override:
		return Retried{}, fault.New(commonv1.Reason_REASON_RETRY_LIMIT_REACHED,
			fmt.Sprintf("%d retries have been used", w.RetryUsed),
			fault.Unmet(fmt.Sprintf("%d of %d retries are used", w.RetryUsed, req.Limit)),
			fault.Remedy("the cause does not pass by itself: decommission the workspace and create it anew, or retry with --override and --reason, which go on record"))
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

func adviceAfter(former []Run) string {
	if len(former) < 2 || former[0].ErrorCode == "" || former[0].ErrorCode != former[1].ErrorCode ||
		former[0].ErrorStep != former[1].ErrorStep {
		return ""
	}
	at := stepNameAt(&former[0], former[0].ErrorStep)
	if former[0].ErrorCode == names.Of(commonv1.Reason_REASON_CANCEL_REQUESTED) {
		return fmt.Sprintf("it was cancelled at the step %q twice: if it stalls there again, decommission it and create it anew", at)
	}
	return fmt.Sprintf("the step %q failed with %s twice: if it fails again, decommission the workspace and create it anew", at, former[0].ErrorCode)
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

func stepNameAt(r *Run, step int) string {
	if step < 0 || step >= len(r.StepNames) {
		return ""
	}
	return r.StepNames[step]
}

func formerRuns(ctx context.Context, tx pgx.Tx, workspaceID string) ([]Run, error) {
	out, err := pg.All[Run](ctx, tx, formerRunsOf, workspaceID)
	if err != nil {
		return nil, fmt.Errorf("read former runs: %w", err)
	}
	return out, nil
}

// foreign returns a fault for a run that this build cannot drive: its driver would put the run aside again.
func (c *Core) foreign(r *Run) error {
	if c.Drives(r) {
		return nil
	}
	return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
		"this build cannot go on with the operation: "+r.StuckReason, fault.Conflicting(r.ID),
		fault.Unmet("this build does not know the steps of "+key(r.Definition, r.DefVersion)), fault.Remedy(c.stuckRemedy(r)))
}

// RetryUndo makes a stuck run try its step again from the first attempt of its policy. A run that is past its deadline
// gets a new one.
func (c *Core) RetryUndo(ctx context.Context, tx pgx.Tx, runID, by string) (Verb, error) {
	r, err := lockStuck(ctx, tx, runID)
	if err != nil {
		return Verb{}, err
	}
	if err := c.foreign(r); err != nil {
		return Verb{}, err
	}
	return c.unstick(ctx, tx, r, r.Step, "asked by "+by)
}

// SkipUndo skips the step at which a run is stuck: the claims that the step would have released become orphans, which
// record by and reason. The run goes on with the next step in its direction, or ends if there is none: as failed if it
// compensates, else as succeeded.
func (c *Core) SkipUndo(ctx context.Context, tx pgx.Tx, runID, by, reason string) (Verb, []claims.Claim, error) {
	if reason == "" {
		return Verb{}, nil, fault.New(commonv1.Reason_REASON_REASON_REQUIRED, "")
	}
	r, err := lockStuck(ctx, tx, runID)
	if err != nil {
		return Verb{}, nil, err
	}
	if err := c.foreign(r); err != nil {
		return Verb{}, nil, err
	}
	def, _ := c.registry.Get(r.Definition, r.DefVersion)
	orphans, err := claims.OrphanStep(ctx, tx, claims.Holder{WorkspaceID: r.WorkspaceID, RunID: r.ID, Step: r.Step},
		def.Steps[r.Step].Kinds, by, reason)
	if err != nil {
		return Verb{}, nil, err
	}
	to := r.Step + 1
	if r.Phase == phaseUndo {
		to = undoable(def, r.Step-1)
	}
	if to < 0 || to >= len(def.Steps) {
		state, ws := stateFailed, def.States.Failed
		if r.Phase == phaseDo {
			state, ws = stateSucceeded, def.States.Succeeded
		}
		v, err := c.endStuck(ctx, tx, r, state, names.Of(ws))
		return v, orphans, err
	}
	v, err := c.unstick(ctx, tx, r, to, fmt.Sprintf("%q skipped by %s", r.StepName(), by))
	return v, orphans, err
}

// CloseStuck ends a stuck run as failed without undoing anything more. Its claims stay for the decommission that is
// started in the same transaction.
func (c *Core) CloseStuck(ctx context.Context, tx pgx.Tx, runID string) (Verb, error) {
	r, err := lockStuck(ctx, tx, runID)
	if err != nil {
		return Verb{}, err
	}
	return c.endStuck(ctx, tx, r, stateFailed, stateFailed)
}

func (c *Core) endStuck(ctx context.Context, tx pgx.Tx, r *Run, state, workspace string) (Verb, error) {
	var err error
	*r, err = pg.One[Run](ctx, tx, endStuckRun, r.ID, state)
	if err != nil {
		return Verb{}, fmt.Errorf("end stuck run: %w", err)
	}
	return c.withWorkspace(ctx, tx, r, workspace, r.ErrorCode, r.Error)
}

func (c *Core) unstick(ctx context.Context, tx pgx.Tx, r *Run, step int, why string) (Verb, error) {
	state, workspace := stateCompensating, names.Of(commonv1.WorkspaceState_WORKSPACE_STATE_CANCELLING)
	more := defaultDeadline
	if r.Phase == phaseDo {
		state = stateWaiting
		if def, ok := c.registry.Get(r.Definition, r.DefVersion); ok {
			workspace, more = names.Of(def.States.Running), def.Deadline
		}
	}
	var err error
	*r, err = pg.One[Run](ctx, tx, unstickRun, r.ID, state, step, why, more.Seconds())
	if err != nil {
		return Verb{}, fmt.Errorf("let run go on: %w", err)
	}
	c.makesDue(tx)
	return c.withWorkspace(ctx, tx, r, workspace, r.ErrorCode, r.Error)
}

func (c *Core) withWorkspace(ctx context.Context, tx pgx.Tx, r *Run, state, code, text string) (Verb, error) {
	var j eventBuffer
	j.run(r)
	if err := c.touchWorkspace(ctx, tx, r, &j, state, code, text); err != nil {
		return Verb{}, err
	}
	pos, err := j.flushPos(ctx, tx)
	return Verb{Run: *r, Changed: true, Pos: pos}, err
}

func lockRun(ctx context.Context, tx pgx.Tx, runID string) (*Run, error) {
	r, err := pg.One[Run](ctx, tx, lockRunByID, runID)
	if pg.IsNoRows(err) {
		return nil, fault.New(commonv1.Reason_REASON_NOT_FOUND, "there is no such operation")
	}
	if err != nil {
		return nil, fmt.Errorf("lock run %s: %w", runID, err)
	}
	return &r, nil
}

// LockLive locks the run that owns a workspace now, if there is one. A caller that locks the workspace or its
// allocation afterwards calls it first, to keep the order of locks.
func LockLive(ctx context.Context, tx pgx.Tx, workspaceID string) error {
	if _, err := pg.Exec(ctx, tx, lockLiveRun, workspaceID); err != nil {
		return fmt.Errorf("lock live run of workspace %s: %w", workspaceID, err)
	}
	return nil
}

func lockStuck(ctx context.Context, tx pgx.Tx, runID string) (*Run, error) {
	r, err := lockRun(ctx, tx, runID)
	if err != nil {
		return nil, err
	}
	if r.State != stateStuck {
		return nil, fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "only a run that is stuck can be helped this way",
			fault.Unmet("the operation is "+r.State+", not stuck"),
			fault.Remedy("let it go on, or cancel it"))
	}
	return r, nil
}

func (c *Core) stuckFault(r *Run) error {
	return fault.New(commonv1.Reason_REASON_RUN_STUCK, "the operation is stuck: "+r.StuckReason, fault.Conflicting(r.ID),
		fault.Unmet("the operation is stuck: "+r.StuckReason), fault.Remedy(c.stuckRemedy(r)))
}

// stuckRemedy returns the remedy for a stuck run. A run that this build cannot drive would be put aside again, so that
// no retry is offered for it.
func (c *Core) stuckRemedy(r *Run) string {
	if !c.Drives(r) {
		return "decommission the workspace, force-release its allocation, or start a build that knows the operation's steps"
	}
	return "retry the undo, skip it with a reason, or decommission"
}

// isOpen returns IsOpen as an unmet condition of another operation.
func isOpen(r *Run) fault.Option { return fault.Unmet(IsOpen(r)) }

// IsOpen returns a text that names an open run with its kind and state.
func IsOpen(r *Run) string {
	return fmt.Sprintf("operation %s (%s) is open and %s", r.ID, r.Kind, r.State)
}

// endRemedy returns the remedy that brings a live run to its end.
func (c *Core) endRemedy(r *Run) string {
	def, known := c.registry.Get(r.Definition, r.DefVersion)
	switch {
	case r.State == stateStuck:
		return c.stuckRemedy(r)
	case r.State == stateCompensating, r.CancelAt != nil:
		return "it is being undone already: wait until the workspace is failed, and ask again"
	case known && def.Uncancellable:
		return r.Kind + " cannot be cancelled: wait until it has ended, and ask again"
	default:
		return "cancel it, wait until the workspace is failed (`gpuaas workspaces wait WS --for state=failed`), and ask again"
	}
}
