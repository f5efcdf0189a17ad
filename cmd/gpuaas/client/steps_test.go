package client_test

import (
	"context"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// TestStepsOfACreateThatFailsAtOnce: the steps are printed in the order in which they ran, whatever the order of the
// changes, including those that ended before the watch began.
func TestStepsOfACreateThatFailsAtOnce(t *testing.T) {
	const failed, succeeded = commonv1.AttemptState_ATTEMPT_STATE_FAILED, commonv1.AttemptState_ATTEMPT_STATE_SUCCEEDED
	undo := timelineItem(1, "reserve_slot", succeeded)
	undo.Direction = commonv1.Direction_DIRECTION_UNDO
	refused := timelineItem(2, "launch_box", failed)
	refused.Error = "no such image"
	undoing := stepItem("reserve_slot", 0, succeeded)
	undoing.GetStep().Direction = commonv1.Direction_DIRECTION_UNDO
	broken := workspace(commonv1.WorkspaceState_WORKSPACE_STATE_FAILED)
	broken.LastError = "no such image"
	for name, before := range map[string]commonv1.WorkspaceState{
		"while it is watched": commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING,
		"before":              commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
	} {
		f := mesh(t)
		stock(f)
		always(f, "GetWorkspace", &readmodelv1.GetWorkspaceResponse{Workspace: workspace(before)})
		timelines(f, [][]*readmodelv1.TimelineItem{{timelineItem(1, "reserve_slot", succeeded), refused, undo}})
		f.watching(func(ctx context.Context, req *readmodelv1.WatchRequest, out send) error {
			for _, item := range []*readmodelv1.WatchItem{
				undoing, stepItem("launch_box", 1, failed), stepItem("reserve_slot", 0, succeeded), workspaceItem(broken),
			} {
				if err := out(itemFrame("", item)); err != nil {
					return err
				}
			}
			return keepOpen(ctx)
		})
		got := call(t, "workspaces", "create", "demo2", "--tenant", "acme", "--wait").wants(t, 5)
		want := "  step 1/2 reserve_slot: succeeded in 1s\n  step 2/2 launch_box: failed in 1s: no such image\n" +
			"  step 1/2 undo reserve_slot: succeeded in 1s\n"
		if !strings.Contains(got.err, want) || strings.Count(got.err, "  step ") != 3 {
			t.Errorf("%s: stderr is\n%s, want\n%s", name, got.err, want)
		}
	}
}

// timelines sets the answers of GetTimeline: each request gets the next one, and then always the last.
func timelines(f *fake, timelines [][]*readmodelv1.TimelineItem) {
	var next atomic.Int64
	answer(f, "GetTimeline", func(*readmodelv1.GetTimelineRequest) (*readmodelv1.GetTimelineResponse, error) {
		return &readmodelv1.GetTimelineResponse{Items: timelines[min(int(next.Add(1)), len(timelines))-1]}, nil
	})
}

func timelineItem(step int, name string, state commonv1.AttemptState) *readmodelv1.TimelineItem {
	item := &readmodelv1.TimelineItem{
		RunId: runID, Step: strconv.Itoa(step), Name: name, Direction: commonv1.Direction_DIRECTION_DO, Attempt: 1,
		State: state, StartedAt: at(step),
	}
	if state == commonv1.AttemptState_ATTEMPT_STATE_RUNNING {
		item.WhyWaiting = "doing the step"
	}
	if state == commonv1.AttemptState_ATTEMPT_STATE_SUCCEEDED || state == commonv1.AttemptState_ATTEMPT_STATE_FAILED {
		item.FinishedAt = at(step + 1)
	}
	return item
}
