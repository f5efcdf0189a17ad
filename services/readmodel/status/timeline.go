package status

import (
	"cmp"
	"slices"
	"strconv"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/runbook"
	"github.com/gpuaas/mesh/services/readmodel/project"
)

// FailedStep returns the name of the step at which a run failed, empty if it did not. A run that was undone, or is
// stuck in its undo, stopped at the furthest step that it had begun, of which last is the last attempt, unless that
// step succeeded: then the run was cancelled between two steps.
func FailedStep(r *lifecyclev1.Run, last *lifecyclev1.StepAttempt) string {
	if wentBack(r.GetState()) && stopped(last.GetState()) {
		return last.GetName()
	}
	return ""
}

func wentBack(state commonv1.RunState) bool {
	switch state { // the others go forward, or did
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
		LastOutput: a.GetLastOutput(), Stage: a.GetStage(),
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
	switch state { // the others have not failed
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
