package client_test

import (
	"context"
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// TestAWaitThatTookTooLongSaysWhatIsTrue has a watch that shows nothing more, and a workspace that is read again when
// the time is over: the wait succeeds if it is as wanted by then, fails with its outcome if it has ended otherwise, and
// says that it goes on only if an operation is under way.
func TestAWaitThatTookTooLongSaysWhatIsTrue(t *testing.T) {
	const provisioning, active, gone = commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING,
		commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED
	failed := workspace(commonv1.WorkspaceState_WORKSPACE_STATE_FAILED)
	failed.LastError, failed.LastErrorCode = "the instance did not start", "launch_failed"
	for name, tt := range map[string]struct {
		first  commonv1.WorkspaceState
		second *readmodelv1.Workspace // nil: it cannot be read
		wanted string
		code   int
		says   []string
		not    string
	}{
		"it goes on": {
			provisioning, workspace(provisioning), "state=active", 6,
			[]string{"it is provisioning", "goes on without you", "gpuaas workspaces timeline acme/demo2"},
			"no operation",
		},
		"it has come about": {provisioning, workspace(active), "state=active", 0, nil, "error"},
		"it has failed": {
			provisioning, failed, "state=active", 5,
			[]string{"launch_failed", "the instance did not start", "gpuaas workspaces actions acme/demo2"},
			"goes on",
		},
		"it is gone": {provisioning, workspace(gone), "state=active", 5, []string{"decommissioned"}, "goes on"},
		"nothing runs": {
			active, workspace(active), "state=failed", 6,
			[]string{"it is active", "no operation is under way"},
			"goes on",
		},
		"nothing answers": {
			provisioning, nil, "state=active", 6, []string{"it was provisioning", "could not be read"}, "goes on",
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := mesh(t)
			stock(f)
			f.watching(func(ctx context.Context, _ *readmodelv1.WatchRequest, out send) error {
				if err := out(itemFrame("t", workspaceItem(workspace(tt.first)))); err != nil {
					return err
				}
				return keepOpen(ctx)
			})
			asked := 0
			answer(f, "GetWorkspace", func(req *readmodelv1.GetWorkspaceRequest) (*readmodelv1.GetWorkspaceResponse, error) {
				asked++
				if asked > 1 && req.GetMinPos() != "7" {
					t.Errorf("the state is read again at position %q, want 7", req.GetMinPos())
				}
				switch {
				case asked == 1:
					return &readmodelv1.GetWorkspaceResponse{Workspace: workspace(tt.first)}, nil
				case tt.second == nil:
					return nil, fault.New(commonv1.Reason_REASON_UNAVAILABLE, "")
				}
				return &readmodelv1.GetWorkspaceResponse{Workspace: tt.second}, nil
			})
			always(f, "GetActions", &readmodelv1.GetActionsResponse{Actions: []*lifecyclev1.ActionOption{{
				Kind: commonv1.OperationKind_OPERATION_KIND_CANCEL,
			}}})
			got := call(t, "workspaces", "wait", "demo2", "--for", tt.wanted, "--timeout", "1s", "--min-pos", "7").
				wants(t, tt.code)
			for _, text := range tt.says {
				if !strings.Contains(got.err, text) {
					t.Errorf("%q is missing in %s", text, got.err)
				}
			}
			if strings.Contains(got.err, tt.not) {
				t.Errorf("%q is in %s", tt.not, got.err)
			}
		})
	}
}

// TestATaskThatEndedAsTheTimeWasOverHasItsOutcome: the watch shows it as queued, and it has succeeded.
func TestATaskThatEndedAsTheTimeWasOverHasItsOutcome(t *testing.T) {
	f := mesh(t)
	stock(f)
	const queued, done = commonv1.TaskState_TASK_STATE_QUEUED, commonv1.TaskState_TASK_STATE_SUCCEEDED
	always(f, "ProbeNode", &readmodelv1.ProbeNodeResponse{Task: &lifecyclev1.Task{
		TaskId: taskID, NodeId: nodeID, Type: commonv1.TaskType_TASK_TYPE_PROBE_NOOP, State: queued,
	}, Pos: "3"})
	f.watching(func(ctx context.Context, _ *readmodelv1.WatchRequest, out send) error {
		if err := out(bootstrapped()); err != nil {
			return err
		}
		return keepOpen(ctx)
	})
	asked := 0
	answer(f, "GetTask", func(*readmodelv1.GetTaskRequest) (*readmodelv1.GetTaskResponse, error) {
		if asked++; asked == 1 {
			return &readmodelv1.GetTaskResponse{Task: task(queued, queued)}, nil
		}
		return &readmodelv1.GetTaskResponse{Task: task(done, queued, done)}, nil
	})
	call(t, "nodes", "probe", "node-1", "--timeout", "1s").wants(t, 0)
}
