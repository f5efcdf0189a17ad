package client

import (
	"context"
	"slices"
	"strconv"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// stepPrinter prints how far a run is. The changes of a watch come in no order, and what ended before it began may be in none of them: each change of a
// step has the timeline read, which has the attempts in their order.
type stepPrinter struct {
	s           *session
	workspaceID string
	runID       string
	printed     map[string]bool
	timeline    []*readmodelv1.TimelineItem // as it was read last
}

// follow prints what is new in the timeline if an attempt of the run has changed. Where the timeline cannot be read the change itself is printed.
func (t *stepPrinter) follow(ctx context.Context, step *lifecyclev1.StepAttempt) {
	if step.GetRunId() != t.runID {
		return
	}
	item := &readmodelv1.TimelineItem{
		Step: number(step.GetStep() + 1), Name: step.GetName(), Direction: step.GetDirection(), Attempt: step.GetAttempt(), State: step.GetState(),
		StartedAt: step.GetStartedAt(), FinishedAt: step.GetFinishedAt(), Error: step.GetError(), WhyWaiting: step.GetWhyWaiting(),
	}
	if !t.printed[t.key(item)] && !t.read(ctx) {
		t.print(item)
	}
}

// finish prints how the run ended: the workspace's own change can come before those of its steps, or before the watch began.
func (t *stepPrinter) finish(ctx context.Context) { t.read(ctx) }

// read reads the timeline, prints what is new in it, and reports whether it could be read.
func (t *stepPrinter) read(ctx context.Context) bool {
	answer, err := t.s.query.GetTimeline(ctx, &readmodelv1.GetTimelineRequest{Workspace: t.workspaceID, RunId: t.runID})
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
	note(t.s.err, "  step %s %s", position, key[len(item.GetStep())+1:])
}

// total is how many steps the run has, as far as it is known.
func (t *stepPrinter) total() int {
	most := 0
	for _, item := range t.timeline {
		if n, err := strconv.Atoi(item.GetStep()); err == nil && item.GetDirection() == commonv1.Direction_DIRECTION_DO {
			most = max(most, n)
		}
	}
	return most
}

// key is what is printed of an attempt, behind the number of its step.
func (t *stepPrinter) key(item *readmodelv1.TimelineItem) string {
	name := or(item.GetName(), "?")
	if item.GetDirection() == commonv1.Direction_DIRECTION_UNDO {
		name = "undo " + name
	}
	if item.GetAttempt() > 1 {
		name += " (attempt " + number(item.GetAttempt()) + ")"
	}
	text := enumText(item.GetState())
	switch {
	case item.GetFinishedAt() != nil && item.GetStartedAt() != nil:
		text += " in " + item.GetFinishedAt().AsTime().Sub(item.GetStartedAt().AsTime()).Round(time.Millisecond).String()
		if item.GetError() != "" {
			text += ": " + clean(item.GetError())
		}
	case item.GetWhyWaiting() != "" && item.GetState() == commonv1.AttemptState_ATTEMPT_STATE_WAITING: // a running one has its run's
		text += ": " + clean(item.GetWhyWaiting())
	}
	return item.GetStep() + " " + clean(name) + ": " + text
}

// lastOutput returns the lines that a failed workload wrote last, for the person who waits. What cannot be read, or may not be seen, is left out.
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
