package agent

import (
	"maps"
	"os/exec"
	"testing"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestAWorkspaceIsMissingUntilItWasSeen checks that a workspace which the list names and the host does not have is
// missing in each round, that one which was seen once is not missing after that, and that a new list replaces the old.
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

// TestWhatRunsIsNotReportedAsGone checks that a workspace of which a process runs, though the agent knows nothing of
// it, is not reported as gone.
func TestWhatRunsIsNotReportedAsGone(t *testing.T) {
	testkit.IO(t)
	runs, gone := ids.New(), ids.New()
	cmd := exec.CommandContext(t.Context(), "/bin/cat")
	cmd.Env = []string{"GPUAAS_WORKSPACE_ID=" + runs}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	missing := map[string]int64{runs: 1, gone: 2}
	leaveRunning(missing)
	if !maps.Equal(missing, map[string]int64{gone: 2}) {
		t.Errorf("missing %v", missing)
	}
	if err := in.Close(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
}
