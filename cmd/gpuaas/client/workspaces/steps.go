package workspaces

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"time"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// stepPrinter prints the progress of a run. The changes of a watch come in no order and may lack attempts that ended
// before the watch began, so each change of a step triggers a read of the timeline, which has the attempts in order.
type stepPrinter struct {
	s           *kit.Session
	workspaceID string
	runID       string
	printed     map[string]bool
	timeline    []*readmodelv1.TimelineItem // the last one that was read
}

// follow prints the new items of the timeline after a change of an attempt of the run. If the timeline cannot be read
// it prints the change itself.
func (t *stepPrinter) follow(ctx context.Context, step *lifecyclev1.StepAttempt) {
	if step.GetRunId() != t.runID {
		return
	}
	item := &readmodelv1.TimelineItem{
		Step: human.Number(step.GetStep() + 1), Name: step.GetName(), Direction: step.GetDirection(),
		Attempt: step.GetAttempt(), State: step.GetState(), StartedAt: step.GetStartedAt(), FinishedAt: step.GetFinishedAt(),
		Error:      step.GetError(),
		WhyWaiting: step.GetWhyWaiting(),
	}
	if !t.printed[t.key(item)] && !t.read(ctx) {
		t.print(item)
	}
}

// finish prints the rest of the timeline when the run has ended, because the change of the workspace can come before
// those of its steps, or before the watch began.
func (t *stepPrinter) finish(ctx context.Context) { t.read(ctx) }

// read reads the timeline, prints its new items, and reports whether it could be read.
func (t *stepPrinter) read(ctx context.Context) bool {
	answer, err := t.s.Query.GetTimeline(ctx, &readmodelv1.GetTimelineRequest{Workspace: t.workspaceID, RunId: t.runID})
	if err != nil {
		return false
	}
	t.timeline = answer.GetItems()
	for _, item := range t.timeline {
		if item.GetState() != commonv1.AttemptState_ATTEMPT_STATE_UNSPECIFIED { // it has begun
			t.print(item)
		}
	}
	return true
}

func (t *stepPrinter) print(item *readmodelv1.TimelineItem) {
	key := t.key(item)
	if t.printed[key] { // a step that polls goes from waiting to running and back, many times
		return
	}
	t.printed[key] = true
	position := item.GetStep()
	if total := t.total(); total > 0 {
		position += "/" + strconv.Itoa(total)
	}
	human.Note(t.s.Err, "  step %s %s", position, key[len(item.GetStep())+1:])
}

// total returns how many steps the run has, as far as the timeline shows.
func (t *stepPrinter) total() int {
	most := 0
	for _, item := range t.timeline {
		if n, err := strconv.Atoi(item.GetStep()); err == nil && item.GetDirection() == commonv1.Direction_DIRECTION_DO {
			most = max(most, n)
		}
	}
	return most
}

// key returns the text that is printed for an attempt, after the number of its step.
func (t *stepPrinter) key(item *readmodelv1.TimelineItem) string {
	name := cmp.Or(item.GetName(), "?")
	if item.GetDirection() == commonv1.Direction_DIRECTION_UNDO {
		name = "undo " + name
	}
	if item.GetAttempt() > 1 {
		name += " (attempt " + human.Number(item.GetAttempt()) + ")"
	}
	text := human.Enum(item.GetState())
	switch {
	case item.GetFinishedAt() != nil && item.GetStartedAt() != nil:
		text += " in " + item.GetFinishedAt().AsTime().Sub(item.GetStartedAt().AsTime()).Round(time.Millisecond).String()
		if item.GetError() != "" {
			text += ": " + human.Clean(item.GetError())
		}
	// only while it waits: the reason that a running attempt has is that of its run
	case item.GetWhyWaiting() != "" && item.GetState() == commonv1.AttemptState_ATTEMPT_STATE_WAITING:
		text += ": " + human.Clean(item.GetWhyWaiting())
	}
	return item.GetStep() + " " + human.Clean(name) + ": " + text
}

// lastOutput returns the lines that a failed workload wrote last, for the person who waits. Output that cannot be read,
// or that the person may not see, is left out.
func (t *stepPrinter) lastOutput() []string {
	for _, item := range slices.Backward(t.timeline) {
		if item.GetLastOutput() != "" {
			lines := []string{"  last output:"}
			for _, line := range indented(item.GetLastOutput()) {
				lines = append(lines, "  "+line)
			}
			return lines
		}
	}
	return nil
}
