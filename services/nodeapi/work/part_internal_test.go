package work

import (
	"slices"
	"testing"
	"time"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

func ref(id string) *nodev1.TaskRef { return &nodev1.TaskRef{TaskId: id, Attempt: 1} }

func of(refs []*nodev1.TaskRef) []string {
	out := make([]string, 0, len(refs))
	for _, r := range refs {
		out = append(out, r.GetTaskId())
	}
	return out
}

func TestPartLeavesUpdatesWithoutAResult(t *testing.T) {
	t.Parallel()
	now := time.Now()
	made := func(since time.Time) *pending {
		return &pending{since: since, frames: 4, bytes: 9, report: &lifecyclev1.NodeReport{
			NodeId: "n", SessionId: "s", Generation: 3,
			Delivered: []*nodev1.TaskRef{ref("a"), ref("b")}, Started: []*nodev1.TaskStarted{{Task: ref("b")}},
			Results: []*nodev1.TaskResult{{Task: ref("a")}},
		}}
	}
	taken, left := made(now.Add(-time.Millisecond)).part(now)
	if left == nil {
		t.Fatal("nothing was left to wait for its result")
	}
	if got := of(taken.report.GetDelivered()); !slices.Equal(got, []string{"a"}) || len(taken.report.GetStarted()) != 0 ||
		len(taken.report.GetResults()) != 1 {
		t.Errorf("taken: %v", taken.report)
	}
	if got := of(left.report.GetDelivered()); !slices.Equal(got, []string{"b"}) || len(left.report.GetStarted()) != 1 ||
		len(left.report.GetResults()) != 0 {
		t.Errorf("left: %v", left.report)
	}
	if left.report.GetNodeId() != "n" || left.report.GetSessionId() != "s" || left.report.GetGeneration() != 3 {
		t.Errorf("left for another session: %v", left.report)
	}
	if taken.frames != 2 || taken.bytes != 9 || left.frames != 2 || left.bytes != 0 || !left.since.Equal(taken.since) {
		t.Errorf("taken %d frames, %d bytes; left %d and %d", taken.frames, taken.bytes, left.frames, left.bytes)
	}
	// Updates that have waited for lazyWait are reported without a split.
	if _, left := made(now.Add(-lazyWait)).part(now); left != nil {
		t.Errorf("left after its time: %v", left.report)
	}
}
