package watchdog

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
)

// ConsumerName is the key of the watchdog's cursor.
const ConsumerName = "watchdog"

// Kinds returns the kinds of events that the watchdog consumes.
func Kinds() []string {
	return []string{
		"workspace.changed", "run.changed", "step.changed", "instance.changed", kindSession, "finding.changed",
	}
}

// stalledStep is the error code that workspaces which hang at the same step have in common.
const stalledStep = "step_stalled"

// Apply writes one event to the watchdog's tables. It implements events.Apply.
func Apply(ctx context.Context, tx pgx.Tx, r events.Record) error {
	switch r.Kind {
	case "workspace.changed":
		return workspaceChanged(ctx, tx, r)
	case "run.changed":
		return runChanged(ctx, tx, r)
	case "step.changed":
		return stepChanged(ctx, tx, r)
	case "instance.changed":
		return instanceChanged(ctx, tx, r)
	case kindSession:
		return sessionsChanged(ctx, tx, []events.Record{r})
	case "finding.changed":
		return findingChanged(ctx, tx, r)
	default:
		return nil // a kind that the watchdog does not consume
	}
}

func workspaceChanged(ctx context.Context, tx pgx.Tx, r events.Record) error {
	w := &lifecyclev1.Workspace{}
	if err := r.Decode(w); err != nil {
		return err
	}
	if w.GetState() == commonv1.WorkspaceState_WORKSPACE_STATE_UNSPECIFIED {
		return errors.New("the workspace has no state")
	}
	err := pg.Queue(ctx, tx, noteWorkspace,
		w.GetWorkspaceId(), r.AggregateVersion, w.GetTenantId(), w.GetTenant(), w.GetName(), names.Of(w.GetState()),
		at(w.GetStateAt(), r.CreatedAt), r.CreatedAt, w.GetEpoch(), w.GetRunId(), w.GetNodeId(),
		names.OfSet(w.GetSpec().GetPlacement()), w.GetRegisterFailures(),
		w.GetLastErrorCode(), w.GetLastError())
	if err != nil {
		return fmt.Errorf("note workspace: %w", err)
	}
	return nil
}

// runFacts are the facts about a run in one event, beside the run itself.
type runFacts struct {
	undone, live, stalled bool
	step                  string                   // the step at which the run is, or failed
	stuckAt               *lifecyclev1.StepAttempt // the attempt that is stalled
	failed                *lifecyclev1.StepAttempt // the attempt that made the run go back
}

func readRun(run *lifecyclev1.Run) runFacts {
	f := runFacts{undone: run.GetPhase() == "undo"}
	switch run.GetState() { //nolint:exhaustive // the others are neither on their way up nor over
	case commonv1.RunState_RUN_STATE_PENDING, commonv1.RunState_RUN_STATE_RUNNING, commonv1.RunState_RUN_STATE_WAITING:
		f.live = true
	}
	if i := int(run.GetStep()); i >= 0 && i < len(run.GetStepNames()) {
		f.step = run.GetStepNames()[i]
	}
	f.stalled = f.live && !f.undone && run.GetStuckReason() != "" && run.GetCancelRequestedAt() == nil
	for _, a := range run.GetChangedSteps() {
		if a.GetDirection() != commonv1.Direction_DIRECTION_DO {
			continue
		}
		if a.GetStalled() {
			f.stuckAt = a
		}
		if a.GetState() == commonv1.AttemptState_ATTEMPT_STATE_FAILED && (f.undone || !f.live) {
			f.failed = a
		}
	}
	return f
}

// recovers reports whether runs of a kind recover a workspace. Such runs are kept from their first event.
func recovers(kind commonv1.OperationKind) bool {
	return kind == commonv1.OperationKind_OPERATION_KIND_RETRY || kind == commonv1.OperationKind_OPERATION_KIND_RECREATE
}

func runChanged(ctx context.Context, tx pgx.Tx, r events.Record) error {
	run := &lifecyclev1.Run{}
	if err := r.Decode(run); err != nil {
		return err
	}
	if run.GetState() == commonv1.RunState_RUN_STATE_UNSPECIFIED {
		return errors.New("the run has no state")
	}
	f := readRun(run)
	step := f.step
	if f.failed != nil {
		step = f.failed.GetName()
	}
	var attempt int32
	var attemptVersion int64
	if f.stuckAt != nil {
		attempt, attemptVersion = f.stuckAt.GetAttempt(), f.stuckAt.GetVersion()
	}
	worth := f.stalled || f.undone || recovers(run.GetKind()) ||
		(!f.live && run.GetState() != commonv1.RunState_RUN_STATE_SUCCEEDED) || run.GetCancelBy() != ""
	args := []any{
		run.GetRunId(), r.AggregateVersion, names.Of(run.GetKind()), names.Of(run.GetState()), run.GetPhase(), step,
		f.stalled, run.GetStuckReason(), attempt, attemptVersion, run.GetRequester(), run.GetParentRunId(), run.GetCancelBy(),
		run.GetErrorCode(), run.GetError(), names.OfSet(run.GetErrorLayer()), moment(run.GetFinishedAt()),
		(f.undone || !f.live) && f.failed == nil,
	}
	note := updateRun
	if worth {
		note = noteRun
		args = append(args, run.GetWorkspaceId(), run.GetTenantId(), at(run.GetCreatedAt(), r.CreatedAt))
	}
	if err := pg.Queue(ctx, tx, note, args...); err != nil {
		return fmt.Errorf("note run: %w", err)
	}
	code, layer := "", ""
	switch {
	case f.failed != nil && run.GetCancelRequestedAt() == nil:
		code, layer = f.failed.GetErrorCode(), names.OfSet(f.failed.GetErrorLayer())
	case f.stuckAt != nil && f.stalled:
		code, layer = stalledStep, names.OfSet(commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW)
	}
	if code == "" || step == "" {
		return nil
	}
	err := pg.Queue(ctx, tx, noteSighting,
		step, code, run.GetRunId(), run.GetWorkspaceId(), run.GetTenantId(), layer, r.CreatedAt)
	if err != nil {
		return fmt.Errorf("note failure: %w", err)
	}
	return nil
}

// stepChanged handles the event that a stalled attempt makes progress again, for a change of an attempt without an
// event of its run. It clears the stalled flag of the present attempt, so that no recovery is requested for an
// operation that moves. It is no evidence of a recovery, and the end of an attempt does not count as progress.
func stepChanged(ctx context.Context, tx pgx.Tx, r events.Record) error {
	a := &lifecyclev1.StepAttempt{}
	if err := r.Decode(a); err != nil {
		return err
	}
	open := a.GetState() == commonv1.AttemptState_ATTEMPT_STATE_RUNNING ||
		a.GetState() == commonv1.AttemptState_ATTEMPT_STATE_WAITING
	if a.GetStalled() || !open || a.GetDirection() != commonv1.Direction_DIRECTION_DO {
		return nil
	}
	err := pg.Queue(ctx, tx, noteProgress,
		a.GetRunId(), a.GetAttempt(), a.GetName(), a.GetVersion(), stalledStep)
	if err != nil {
		return fmt.Errorf("note progress: %w", err)
	}
	return nil
}

func instanceChanged(ctx context.Context, tx pgx.Tx, r events.Record) error {
	i := &lifecyclev1.Instance{}
	if err := r.Decode(i); err != nil {
		return err
	}
	err := pg.Queue(ctx, tx, noteInstance,
		i.GetWorkspaceId(), i.GetEpoch(), r.AggregateVersion, i.GetInstanceId(), names.Of(i.GetState()),
		names.OfSet(i.GetPlacement()), i.GetNodeId(),
		moment(i.GetStartedAt()))
	if err != nil {
		return fmt.Errorf("note instance: %w", err)
	}
	return nil
}

// findingChanged keeps that a machine has nothing of a workspace, for as long as lifecycle's finding says so: two scans
// a minute apart have compared what the connected agent reports with what the workspace claims there.
func findingChanged(ctx context.Context, tx pgx.Tx, r events.Record) error {
	f := &lifecyclev1.Finding{}
	if err := r.Decode(f); err != nil {
		return err
	}
	if f.GetKind() != commonv1.FindingKind_FINDING_KIND_CLAIM_WITHOUT_RESOURCE || f.GetWorkspaceId() == "" ||
		f.GetNodeId() == "" {
		return nil
	}
	if !f.GetEmptied() || f.GetResolvedAt() != nil {
		if err := pg.Queue(ctx, tx, forgetEmptied, f.GetFindingId()); err != nil {
			return fmt.Errorf("forget an emptied machine: %w", err)
		}
		return nil
	}
	err := pg.Queue(ctx, tx, noteEmptied,
		f.GetFindingId(), f.GetWorkspaceId(), f.GetNodeId(), at(f.GetFirstSeenAt(), r.CreatedAt))
	if err != nil {
		return fmt.Errorf("note an emptied machine: %w", err)
	}
	return nil
}

// forget deletes rows that no rule reads, since what they describe has ended, most of them once they are older than
// after. It reports whether there may be more of them.
func forget(ctx context.Context, tx pgx.Tx, after time.Duration) (bool, error) {
	more := false
	for i, over := range slices.Concat(forgottenByRule, forgottenByAge) {
		var term []any
		if i >= len(forgottenByRule) {
			term = append(term, after.Seconds())
		}
		tag, err := pg.Exec(ctx, tx, over, term...)
		if err != nil {
			return false, fmt.Errorf("forget what is over: %w", err)
		}
		more = more || tag.RowsAffected() >= forgottenAtOnce
	}
	return more, nil
}

func moment(t *timestamppb.Timestamp) *time.Time {
	if t == nil {
		return nil
	}
	out := t.AsTime()
	return &out
}

func at(t *timestamppb.Timestamp, otherwise time.Time) time.Time {
	if t == nil {
		return otherwise
	}
	return t.AsTime()
}
