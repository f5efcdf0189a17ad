package agent

import (
	"maps"
	"testing"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// TestAWorkspaceIsMissingUntilItWasSeen: what the list names and the host does not have is missing in each round; what
// was seen once is not missing after that, and a new list replaces the old.
func TestAWorkspaceIsMissingUntilItWasSeen(t *testing.T) {
	var e expected
	want := func(seen map[string][]*nodev1.WorkloadStatus, epochs map[string]int64) {
		t.Helper()
		if got := e.missing(seen); !maps.Equal(got, epochs) {
			t.Errorf("missing %v, want %v", got, epochs)
		}
	}
	want(nil, map[string]int64{})
	e.set([]*nodev1.WorkspaceEpoch{{WorkspaceId: "one", Epoch: 3}, {WorkspaceId: "two", Epoch: 1}})
	for range 2 {
		want(nil, map[string]int64{"one": 3, "two": 1})
	}
	want(map[string][]*nodev1.WorkloadStatus{"two": {{}}}, map[string]int64{"one": 3})
	want(nil, map[string]int64{"one": 3})
	e.set(nil)
	want(nil, map[string]int64{})
}
