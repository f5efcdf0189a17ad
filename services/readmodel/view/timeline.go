package view

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/runbook"
	"github.com/gpuaas/mesh/services/readmodel/project"
)

// Timeline returns a workspace, its newest 100 runs (newest first, those that a reset has archived too) and the items
// of one run: of the run that is named, else of the workspace's current run. A run of another workspace is fault
// not_found, whichever tenant owns it.
func (s *Snapshot) Timeline(ctx context.Context, ref, runID string) (*readmodelv1.GetTimelineResponse, error) {
	w, err := s.Workspace(ctx, ref)
	if err != nil {
		return nil, err
	}
	runs, _, err := s.Runs(ctx, RunFilter{WorkspaceID: w.GetWorkspaceId()}, Page{Size: defaultPage})
	if err != nil {
		return nil, err
	}
	out := &readmodelv1.GetTimelineResponse{Workspace: w, Runs: runs}
	shown, err := s.shownRun(ctx, w, runs, runID)
	if err != nil || shown == nil {
		return out, err
	}
	attempts, err := s.Steps(ctx, []string{shown.GetRunId()})
	if err != nil {
		return nil, err
	}
	out.Items = Timeline(shown, attempts, s.Now)
	if out.History, err = s.history(ctx, runs); err != nil {
		return nil, err
	}
	for _, b := range out.GetHistory() {
		b.Shown = b.GetRunId() == shown.GetRunId()
	}
	return out, nil
}

// shownRun returns the run with the requested id, else the workspace's current run; nil if there was none yet.
func (s *Snapshot) shownRun(ctx context.Context, w *readmodelv1.Workspace, runs []*lifecyclev1.Run,
	id string,
) (*lifecyclev1.Run, error) {
	if id != "" {
		id = strings.ToLower(id)
		found, _, err := s.Runs(ctx, RunFilter{WorkspaceID: w.GetWorkspaceId(), IDs: idList(id)}, Page{Size: 1})
		if err != nil {
			return nil, err
		}
		if len(found) == 0 {
			return nil, fault.New(commonv1.Reason_REASON_NOT_FOUND, "the workspace has no such run",
				fault.Remedy("name one of the runs that its timeline lists"))
		}
		return found[0], nil
	}
	for _, r := range runs {
		if r.GetRunId() == w.GetRunId() {
			return r, nil
		}
	}
	return first(runs), nil
}

type lastStepRow struct {
	RunID string `db:"run_id" expr:"@.run_id::text"`
	Body  []byte `db:"body"`
}

var lastStepsOfRuns = pg.Define(pg.RoleReadmodel, "view.last_steps_of_runs", `
	SELECT DISTINCT ON (t.run_id) `+pg.Columns[lastStepRow]("t")+` FROM readmodel.step t JOIN readmodel.run r ON r.run_id = t.run_id
	WHERE r.run_id = ANY($2::uuid[]) AND t.run_id = ANY($2::uuid[]) AND t.direction = 'do' AND ($1::uuid IS NULL OR r.tenant_id = $1)
	ORDER BY t.run_id, t.step DESC, t.attempt DESC`)

// history returns a summary of each run. A run that was undone, or is stuck in its undo, stopped at the furthest step
// that it had begun, unless that step succeeded: then the run was cancelled between two steps.
func (s *Snapshot) history(ctx context.Context, runs []*lifecyclev1.Run) ([]*readmodelv1.RunBrief, error) {
	ids := make([]string, 0, len(runs))
	for _, r := range runs {
		ids = append(ids, r.GetRunId())
	}
	rows, err := pg.All[lastStepRow](ctx, s.tx, lastStepsOfRuns, s.scope.arg(), ids)
	if err != nil {
		return nil, fmt.Errorf("read the last steps of runs: %w", err)
	}
	last := map[string]*lifecyclev1.StepAttempt{} // of which only the state and the name are used
	for _, row := range rows {
		if last[row.RunID], err = decode[lifecyclev1.StepAttempt](row.Body); err != nil {
			return nil, fmt.Errorf("read the last steps of runs: %w", err)
		}
	}
	out := make([]*readmodelv1.RunBrief, 0, len(runs))
	for _, r := range runs {
		b := &readmodelv1.RunBrief{
			RunId: r.GetRunId(), Kind: r.GetKind(), State: r.GetState(), StartedAt: r.GetCreatedAt(), EndedAt: r.GetFinishedAt(),
			Error: r.GetError(), ErrorCode: r.GetErrorCode(), ErrorLayer: r.GetErrorLayer(),
		}
		if wentBack(r.GetState()) && stopped(last[r.GetRunId()].GetState()) {
			b.FailedStep = last[r.GetRunId()].GetName()
		}
		out = append(out, b)
	}
	return out, nil
}

func wentBack(state commonv1.RunState) bool {
	switch state { //nolint:exhaustive // the others go forward, or did
	case commonv1.RunState_RUN_STATE_COMPENSATING, commonv1.RunState_RUN_STATE_STUCK, commonv1.RunState_RUN_STATE_FAILED:
		return true
	default:
		return false
	}
}

// stopped reports whether an attempt ended without completing its step.
func stopped(state commonv1.AttemptState) bool {
	return failed(state) || state == commonv1.AttemptState_ATTEMPT_STATE_CANCELLED
}

// Timeline returns the items of one run: first its forward steps, each with its attempts exactly as they were recorded
// or, if there was none, as not begun (attempt 0, state unspecified); then the steps that were undone, in the order of
// the undo.
func Timeline(r *lifecyclev1.Run, attempts []*lifecyclev1.StepAttempt, now time.Time) []*readmodelv1.TimelineItem {
	attempts = slices.Clone(attempts)
	slices.SortStableFunc(attempts, func(a, b *lifecyclev1.StepAttempt) int {
		if c := cmp.Compare(a.GetDirection(), b.GetDirection()); c != 0 {
			return c
		}
		steps := cmp.Compare(a.GetStep(), b.GetStep())
		if a.GetDirection() == commonv1.Direction_DIRECTION_UNDO {
			steps = -steps
		}
		return cmp.Or(steps, cmp.Compare(a.GetAttempt(), b.GetAttempt()))
	})
	var items []*readmodelv1.TimelineItem
	done := 0 // steps laid out so far
	ahead := func(until int) {
		for ; done < until; done++ {
			items = append(items, &readmodelv1.TimelineItem{
				Step: number(done), Name: r.GetStepNames()[done], Direction: commonv1.Direction_DIRECTION_DO, RunId: r.GetRunId(),
				Round: r.GetRound(),
			})
		}
	}
	undoing := false
	for _, a := range attempts {
		if a.GetDirection() == commonv1.Direction_DIRECTION_UNDO && !undoing {
			undoing = true
			ahead(len(r.GetStepNames()))
		}
		if !undoing {
			ahead(min(int(a.GetStep()), len(r.GetStepNames())))
			done = max(done, int(a.GetStep())+1)
		}
		items = append(items, item(r, a, now))
	}
	ahead(len(r.GetStepNames()))
	return items
}

func item(r *lifecyclev1.Run, a *lifecyclev1.StepAttempt, now time.Time) *readmodelv1.TimelineItem {
	i := &readmodelv1.TimelineItem{
		Step: number(int(a.GetStep())), Name: a.GetName(), Direction: a.GetDirection(), Attempt: a.GetAttempt(),
		State: a.GetState(), StartedAt: a.GetStartedAt(), DurationSeconds: between(a.GetStartedAt(), a.GetFinishedAt(), now),
		Stalled: a.GetStalled(), Error: a.GetError(), ErrorCode: a.GetErrorCode(), ErrorLayer: a.GetErrorLayer(),
		FinishedAt: a.GetFinishedAt(), Progress: a.GetProgress(), WhyWaiting: a.GetWhyWaiting(), RunId: a.GetRunId(),
		Round: r.GetRound(), Cause: a.GetCause(),
		LastOutput: a.GetLastOutput(),
	}
	if a.GetFinishedAt() == nil && a.GetHeartbeatAt() != nil {
		i.HeartbeatAgeSeconds = between(a.GetHeartbeatAt(), nil, now)
	}
	if a.GetStalled() || failed(a.GetState()) {
		row, _ := runbook.Of(a.GetName())
		if a.GetErrorLayer() == commonv1.OwnerLayer_OWNER_LAYER_WORKLOAD {
			row = runbook.OfWorkload(a.GetName())
		}
		i.LikelyCause, i.Advice = row.Cause, row.Advice
	}
	if project.OpenAttempt(a.GetState()) && i.GetWhyWaiting() == "" {
		i.WhyWaiting = r.GetWhyWaiting()
	}
	return i
}

func failed(state commonv1.AttemptState) bool {
	switch state { //nolint:exhaustive // the others have not failed
	case commonv1.AttemptState_ATTEMPT_STATE_FAILED, commonv1.AttemptState_ATTEMPT_STATE_LOST,
		commonv1.AttemptState_ATTEMPT_STATE_ABANDONED:
		return true
	default:
		return false
	}
}

// number returns the number of a step, counted from 1, as text.
func number(step int) string { return strconv.Itoa(step + 1) }

func between(from, to *timestamppb.Timestamp, now time.Time) float64 {
	if from == nil {
		return 0
	}
	end := now
	if to != nil {
		end = to.AsTime()
	}
	return max(0, end.Sub(from.AsTime()).Seconds())
}
