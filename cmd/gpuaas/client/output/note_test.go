package output_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/workspaces"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// TestACrashLoopIsSeenInANarrowList: at 80 columns USER STATE is shown beside the error of another workspace, and the
// free texts are dropped before it.
func TestACrashLoopIsSeenInANarrowList(t *testing.T) {
	active := func(name string, user commonv1.UserState, workloads string) *readmodelv1.Workspace {
		return &readmodelv1.Workspace{
			WorkspaceId: uuidOne, Tenant: "acme", Name: name, State: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, Epoch: 1,
			StateAt: ago(60e9), UserState: user, AgentConnected: true, NodeName: "box-91c2ba66a743-1", WorkloadDetail: workloads,
		}
	}
	failed := &readmodelv1.Workspace{
		WorkspaceId: uuidTwo, Tenant: "acme", Name: "broken", State: commonv1.WorkspaceState_WORKSPACE_STATE_FAILED, Epoch: 3,
		StateAt: ago(60e9), UserState: commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED, LastError: longError,
	}
	items := []*readmodelv1.Workspace{
		active("train", commonv1.UserState_USER_STATE_TEMPORARY,
			"crash loop: main, 3 restarts, exited with status 3 at 2026-01-02T03:04:05Z"),
		active("job", commonv1.UserState_USER_STATE_NORMAL, "finished: main at 2026-01-02T03:04:05Z"), failed,
	}
	var out bytes.Buffer
	if err := output.List(terminal(&out, 80), workspaces.View, items, ""); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"USER STATE", "temporary", "normal", "operator_action_required", "launch_box",
		"crash loo", "finished:",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("there is no %q:\n%s", want, out.String())
		}
	}
	long := active("canary-7f3a91c2-training-run", commonv1.UserState_USER_STATE_TEMPORARY, items[0].GetWorkloadDetail())
	long.Tenant = "research"
	out.Reset()
	if err := output.List(terminal(&out, 80), workspaces.View, append(items, long), ""); err != nil {
		t.Fatal(err)
	}
	if header, _, _ := strings.Cut(out.String(), "\n"); strings.Join(strings.Fields(header),
		" ") != "TENANT NAME STATE USER STATE" {
		t.Errorf("the free texts stay, or USER STATE goes:\n%s", out.String())
	}
}
