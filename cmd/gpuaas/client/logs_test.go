package client_test

import (
	"context"
	"strings"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

func TestLogsPrintsTheNewestOutputClean(t *testing.T) {
	f := mesh(t)
	stock(f)
	always(f, "ReadOutput", &readmodelv1.ReadOutputResponse{Workload: "main", Output: &nodev1.WorkloadOutput{
		Run: "r1", Offset: 900, DroppedBytes: 900,
		Data: []byte("\x1b[31mred\x1b[0m \x1b]0;title\x07key=****\r\nü\u202e\x00 end\n"), Ended: true, ExitCode: 137,
		Next: &nodev1.OutputCursor{Run: "r1", Offset: 950}, Phase: nodev1.WorkloadPhase_WORKLOAD_PHASE_BACKOFF,
	}})
	got := call(t, "workspaces", "logs", "acme/demo2", "--workload", "main", "--previous").wants(t, 0)
	golden(t, "logs.golden", "-- stdout --\n"+got.out+"-- stderr --\n"+got.err)
	req := sent[*readmodelv1.ReadOutputRequest](f)[0]
	if req.GetWorkspace() != workspaceID || req.GetWorkload() != "main" || !req.GetPrevious() || req.GetFrom() != nil {
		t.Errorf("asked %v", req)
	}
	goldenJSON(t, "logs.json", call(t, "workspaces", "logs", "acme/demo2", "-o", "json").wants(t, 0).out)
	always(f, "ReadOutput", &readmodelv1.ReadOutputResponse{
		Workload: "main",
		Output:   &nodev1.WorkloadOutput{Run: "r1", Restarts: 2},
	})
	if got := call(t, "workspaces", "logs", "acme/demo2").wants(t, 0); got.out != "" ||
		!strings.Contains(got.err, "main has written nothing since its restart; it was restarted 2 times: see --previous") {
		t.Errorf("stdout %q, stderr %q", got.out, got.err)
	}
}

func TestLogsRefusals(t *testing.T) {
	f := mesh(t)
	stock(f)
	call(t, "workspaces", "logs", "acme/demo2", "-f", "--previous").wants(t, 2)
	call(t, "workspaces", "logs", "acme/demo2", "-f", "-o", "json").wants(t, 2)
	refuse(f, "ReadOutput", fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "the workspace has 2 workloads: web, job",
		fault.Remedy("name one of them with --workload")))
	if got := call(t, "workspaces", "logs", "acme/demo2").wants(t, 2); !strings.Contains(got.err, "web, job") ||
		!strings.Contains(got.err, "--workload") {
		t.Errorf("stderr %q", got.err)
	}
	refuse(f, "ReadOutput", fault.New(commonv1.Reason_REASON_NODE_NOT_CONNECTED, ""))
	for _, args := range [][]string{{"workspaces", "logs", "acme/demo2"}, {"workspaces", "logs", "acme/demo2", "-f"}} {
		if got := call(t, args...); got.code == 0 || !strings.Contains(got.err, "node_not_connected") {
			t.Errorf("%q: exit %d, %s", args, got.code, got.err)
		}
	}
	// The client repeats a read that came too soon after another person's.
	tries := 0
	answer(f, "ReadOutput", func(*readmodelv1.ReadOutputRequest) (*readmodelv1.ReadOutputResponse, error) {
		if tries++; tries < 3 {
			return nil, fault.New(commonv1.Reason_REASON_RATE_LIMITED, "too soon", fault.RetryAfter(20*time.Millisecond))
		}
		return &readmodelv1.ReadOutputResponse{Workload: "main", Output: &nodev1.WorkloadOutput{Data: []byte("out\n")}}, nil
	})
	if got := call(t, "workspaces", "logs", "acme/demo2").wants(t, 0); got.out != "out\n" || tries != 3 {
		t.Errorf("%q after %d tries", got.out, tries)
	}
}

// TestLogsFollow: each byte once, whatever the pieces cut in two; restarts and dropped bytes are noted; it ends with
// the workload.
func TestLogsFollow(t *testing.T) {
	f := mesh(t)
	stock(f)
	type piece = nodev1.WorkloadOutput
	cursor := func(run string, offset int64) *nodev1.OutputCursor {
		return &nodev1.OutputCursor{Run: run, Offset: offset}
	}
	pieces := []*piece{
		{Run: "r1", Offset: 10, DroppedBytes: 10, Data: []byte("one \x1b[3"), Next: cursor("r1", 17)},
		{Run: "r1", Offset: 17, Data: []byte("1mtwo\n"), Ended: true, ExitCode: 1, Next: cursor("r2", 0), More: true},
		{Run: "r2", Offset: 100, DroppedBytes: 100, Data: []byte("three\n"), Next: cursor("r2", 106)},
		{
			Run: "r2", Offset: 106, Data: []byte("last"), Ended: true, ExitCode: 0, Next: cursor("r2", 110),
			Phase: nodev1.WorkloadPhase_WORKLOAD_PHASE_EXITED,
		},
	}
	broke := false
	answer(f, "ReadOutput", func(req *readmodelv1.ReadOutputRequest) (*readmodelv1.ReadOutputResponse, error) {
		if len(pieces) == 2 && !broke {
			broke = true
			return nil, fault.New(commonv1.Reason_REASON_NODE_NOT_CONNECTED, "")
		}
		next := pieces[0]
		pieces = pieces[1:]
		return &readmodelv1.ReadOutputResponse{Workload: "main", Output: next}, nil
	})
	got := call(t, "workspaces", "logs", "acme/demo2", "-f").wants(t, 0)
	golden(t, "logs_follow.golden", "-- stdout --\n"+got.out+"\n-- stderr --\n"+got.err)
	var asked []string
	for _, req := range sent[*readmodelv1.ReadOutputRequest](f) {
		asked = append(asked, req.GetWorkload()+"/"+req.GetFrom().GetRun())
	}
	if want := "/ main/r1 main/r2 main/r2 main/r2"; strings.Join(asked, " ") != want {
		t.Errorf("asked %q, want %q", asked, want)
	}
}

func TestLogsFollowEndsWithThePerson(t *testing.T) {
	f := mesh(t)
	stock(f)
	ctx, cancel := context.WithCancel(t.Context())
	answer(f, "ReadOutput", func(*readmodelv1.ReadOutputRequest) (*readmodelv1.ReadOutputResponse, error) {
		cancel()
		return &readmodelv1.ReadOutputResponse{
			Workload: "main",
			Output:   &nodev1.WorkloadOutput{Run: "r1", Next: &nodev1.OutputCursor{Run: "r1"}},
		}, nil
	})
	if got := callIn(ctx, nil, "workspaces", "logs", workspaceID, "-f"); got.code != 130 || got.err != "interrupted\n" {
		t.Errorf("exit %d: %s", got.code, got.err)
	}
}

// TestAFailedWaitShowsTheLastOutput: the first mistake of a newcomer is read where they wait.
func TestAFailedWaitShowsTheLastOutput(t *testing.T) {
	f := mesh(t)
	stock(f)
	failed := &readmodelv1.Workspace{
		WorkspaceId: workspaceID, Tenant: "acme", Name: "demo2", State: commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
		LastError:     "workload main was restarted 3 times before it was ready: exited with status 1",
		LastErrorCode: "workload_crash_loop",
	}
	always(f, "CreateWorkspace", &readmodelv1.CreateWorkspaceResponse{Operation: &lifecyclev1.Operation{
		OperationId: "run",
		WorkspaceId: workspaceID,
	}})
	always(f, "GetWorkspace", &readmodelv1.GetWorkspaceResponse{Workspace: failed})
	always(f, "GetTimeline", &readmodelv1.GetTimelineResponse{Items: []*readmodelv1.TimelineItem{
		{
			Step: "6", Name: "Wait for workloads ready", Attempt: 1, Error: failed.GetLastError(),
			LastOutput: "sleep: invalid time interval 'x\x1b[2J'\nTry 'sleep --help'",
		},
		{Step: "7", Name: "Mark active"},
	}})
	got := call(t, "workspaces", "create", "demo2", "--tenant", "acme", "--wait").wants(t, 5)
	for _, want := range []string{
		"  last output:\n", "sleep: invalid time interval 'x", "Try 'sleep --help'", "exited with status 1",
		"workload_crash_loop",
	} {
		if !strings.Contains(got.err, want) {
			t.Errorf("stderr holds no %q: %s", want, got.err)
		}
	}
	if strings.ContainsRune(got.err, '\x1b') {
		t.Errorf("stderr has an escape: %q", got.err)
	}
}
