package client_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// send is the function with which a watch writes its frames.
type send = func(*readmodelv1.WatchResponse) error

func itemFrame(token string, item *readmodelv1.WatchItem) *readmodelv1.WatchResponse {
	return &readmodelv1.WatchResponse{Frame: &readmodelv1.WatchResponse_Item{Item: item}, ResumeToken: token}
}

func workspaceItem(w *readmodelv1.Workspace) *readmodelv1.WatchItem {
	return &readmodelv1.WatchItem{
		Topic: readmodelv1.Topic_TOPIC_WORKSPACES, Change: readmodelv1.Change_CHANGE_UPDATED,
		Id: w.GetWorkspaceId(), Object: &readmodelv1.WatchItem_Workspace{Workspace: w},
	}
}

func stepItem(name string, number int32, state commonv1.AttemptState) *readmodelv1.WatchItem {
	step := &lifecyclev1.StepAttempt{
		RunId: runID, Step: number, Name: name, Direction: commonv1.Direction_DIRECTION_DO,
		Attempt: 1, State: state, StartedAt: at(1),
	}
	if state == commonv1.AttemptState_ATTEMPT_STATE_SUCCEEDED {
		step.FinishedAt = at(2)
	}
	return &readmodelv1.WatchItem{Topic: readmodelv1.Topic_TOPIC_STEPS, Object: &readmodelv1.WatchItem_Step{Step: step}}
}

func bootstrapped() *readmodelv1.WatchResponse {
	return &readmodelv1.WatchResponse{
		Frame: &readmodelv1.WatchResponse_Bootstrapped{Bootstrapped: &readmodelv1.Bootstrapped{Total: 1}},
	}
}

// keepOpen keeps a stream open until the client ends it.
func keepOpen(ctx context.Context) error {
	<-ctx.Done()
	return ctx.Err()
}

// TestTimelineOfAFormerRun: the named run is requested, and a run that the workspace does not have is not found.
func TestTimelineOfAFormerRun(t *testing.T) {
	f := mesh(t)
	stock(f)
	call(t, "workspaces", "timeline", "acme/demo2", "--run", taskID).wants(t, 0)
	if got := sent[*readmodelv1.GetTimelineRequest](f); len(got) != 1 || got[0].GetRunId() != taskID ||
		got[0].GetWorkspace() != "acme/demo2" {
		t.Errorf("asked for %v", got)
	}
	refuse(f, "GetTimeline", fault.New(commonv1.Reason_REASON_NOT_FOUND, "the workspace has no such run",
		fault.Remedy("name one of the runs")))
	if got := call(t, "workspaces", "timeline", "acme/demo2", "--run", taskID).wants(t, 3); !strings.Contains(got.err,
		"hint: name one of the runs") {
		t.Errorf("refused with %q", got.err)
	}
}

// TestRefusals: each kind of refusal has its exit code, and its output gives the cause and what to do, as text and as
// JSON.
func TestRefusals(t *testing.T) {
	f := mesh(t)
	stock(f)
	tests := []struct {
		name string
		err  error
		code int
		want []string
	}{
		{
			"not found", fault.New(commonv1.Reason_REASON_NOT_FOUND, "there is no such node"), 3,
			[]string{"error: not_found: there is no such node", "correlation id: "},
		},
		{"tenant", fault.New(commonv1.Reason_REASON_TENANT_UNKNOWN, ""), 3, []string{"tenant_unknown"}},
		{
			"argument", fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "bad name"), 2,
			[]string{"invalid_argument: bad name"},
		},
		{"login", fault.New(commonv1.Reason_REASON_UNAUTHENTICATED, ""), 4, []string{"unauthenticated"}},
		{"role", fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, ""), 4, []string{"permission_denied"}},
		{"held node", fault.New(commonv1.Reason_REASON_IDENTITY_HELD, ""), 5, []string{"identity_held"}},
		{"name taken", fault.New(commonv1.Reason_REASON_WORKSPACE_NAME_TAKEN, ""), 5, []string{"workspace_name_taken"}},
		{
			"quota", fault.New(commonv1.Reason_REASON_QUOTA_EXCEEDED, "9 of 8 GPUs", fault.Remedy("ask for fewer"),
				fault.Unmet("8 GPUs are held")), 5,
			[]string{"error: quota_exceeded: 9 of 8 GPUs", "because: 8 GPUs are held", "hint: ask for fewer"},
		},
		{
			"in progress", fault.New(commonv1.Reason_REASON_OPERATION_IN_PROGRESS, "", fault.Conflicting(runID)), 5,
			[]string{"in the way: " + runID},
		},
		{"capacity", fault.New(commonv1.Reason_REASON_NO_CAPACITY, ""), 5, []string{"no_capacity"}},
		{"conflict", fault.New(commonv1.Reason_REASON_CONFLICT, ""), 5, []string{"conflict"}},
		{"overload", fault.New(commonv1.Reason_REASON_OVERLOADED, "", fault.RetryAfter(2e9)), 1, []string{"retry after: 2s"}},
		{"internal", errors.New("pq: secret table"), 1, []string{"error: internal"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			refuse(f, "GetNode", tt.err)
			got := call(t, "nodes", "get", "n").wants(t, tt.code)
			if got.out != "" {
				t.Errorf("wrote to stdout: %q", got.out)
			}
			for _, want := range tt.want {
				if !strings.Contains(got.err, want) {
					t.Errorf("stderr does not hold %q: %s", want, got.err)
				}
			}
			if strings.Contains(got.err, "secret") {
				t.Errorf("a cause left the server: %s", got.err)
			}
			asJSON := call(t, "nodes", "get", "n", "-o", "json").wants(t, tt.code)
			var object struct {
				Error map[string]any `json:"error"`
			}
			decode(t, asJSON.err, &object)
			for _, field := range []string{
				"code", "reason", "action", "message", "retry_after_seconds", "correlation_id",
				"unmet",
			} {
				if object.Error[field] == nil {
					t.Errorf("no %s in %s", field, asJSON.err)
				}
			}
			if len(object.Error["correlation_id"].(string)) != 36 {
				t.Errorf("correlation id: %v", object.Error["correlation_id"])
			}
		})
	}
}

// TestUsage: a mistake in the command line is found before a request is sent, and exits 2.
func TestUsage(t *testing.T) {
	f := mesh(t)
	stock(f)
	for _, line := range []string{
		"nodes", "nodes lst", "nodes list extra", "nodes get", "nodes list --bogus", "-o xml status", "nodes hold node-1",
		"nodes retire node-1 --reason ", "workspaces create demo", "workspaces create --tenant acme",
		"workspaces create d --tenant acme --arg x", "workspaces create d --tenant acme --storage ten",
		"workspaces create d --tenant acme --placement moon", "workspaces create d --tenant acme --command a --port x",
		"workspaces create d --tenant acme --spec /does/not/exist", "workspaces wait d --for active",
		"workspaces wait d --for state=great", "workspaces wait d --for colour=red", "workspaces list --state great",
		"workspaces recreate d --fenced-proof powered_off", "workspaces recreate d --fenced-proof maybe --reason r",
		"workspaces skip-undo d", "tasks cancel x", "tasks list --state great", "nodes enroll", "nodes enroll --name n",
		"status --time-format never", "workspaces decommission d", "workspaces decommission d --reason r",
		"workspaces recreate d --reason r", "workspaces skip-undo d --reason r", "nodes fence n --reason r",
		"nodes retire n --reason r", "rollback accept --reason r", "instances end i --reason r",
		"tenants create a --storage x", "policy set a", "explain", "explain agent_down",
		"nodes diag n --file /does/not/exist", "nodes bundle n --reason r --valid-for 0s",
		"nodes list --limit many",
	} {
		t.Run(line, func(t *testing.T) {
			got := call(t, strings.Split(line, " ")...).wants(t, 2)
			if got.out != "" || !strings.HasPrefix(got.err, "error: invalid_argument: ") &&
				!strings.HasPrefix(got.err, "error: reason_required: ") {
				t.Errorf("stdout %q, stderr %q", got.out, got.err)
			}
		})
	}
	for _, filter := range []string{".[", "nosuch"} {
		if got := call(t, "status", "--jq", filter).wants(t, 2); !strings.Contains(got.err, "--jq") || got.out != "" {
			t.Errorf("stdout %q, stderr %q", got.out, got.err)
		}
	}
	if len(f.requests) != 0 {
		t.Errorf("asked the server: %v", f.requests)
	}
	for _, line := range []string{"explain reason bogus", "--context bogus status", "config use-context bogus"} {
		got := call(t, strings.Fields(line)...).wants(t, 3)
		if !strings.HasPrefix(got.err, "error: not_found: ") || !strings.Contains(got.err, "\n  hint: list ") {
			t.Errorf("%s: %s", line, got.err)
		}
	}
	call(t, "allocations", "get", "bogus").wants(t, 3)
	call(t, "tenants", "get", "bogus").wants(t, 3)
}

// TestServer: which server the client connects to, and to which one it sends its token.
func TestServer(t *testing.T) {
	f := mesh(t)
	stock(f)
	call(t, "status").wants(t, 0)

	got := call(t, "status", "--server", "127.0.0.1:1").wants(t, 1)
	if !strings.Contains(got.err, "127.0.0.1:1 cannot be reached") || !strings.Contains(got.err, "hint:") {
		t.Errorf("stderr: %s", got.err)
	}
	call(t, "status", "--server", "http://127.0.0.1:1").wants(t, 2)
	dir := t.TempDir()
	file := filepath.Join(dir, "token")
	write(t, file, "gps_wrong\n", 0o600)
	call(t, "status", "--token-file", file).wants(t, 4)
	write(t, file, token+"\n", 0o600)
	call(t, "status", "--token-file", file).wants(t, 0)
	if err := os.Chmod(file, 0o644); err != nil { // the point of the test
		t.Fatal(err)
	}
	if got := call(t, "status", "--token-file", file).wants(t, 2); !strings.Contains(got.err, "others than its owner") {
		t.Errorf("stderr: %s", got.err)
	}
	if got := call(t, "status", "--ca-file", file).wants(t, 2); !strings.Contains(got.err, "--token-file") {
		t.Errorf("the context's token would go to another authority's server: %s", got.err)
	}

	view := call(t, "config", "view", "-o", "json").wants(t, 0)
	if strings.Contains(view.out, token) || !strings.Contains(view.out, `"current": "test"`) {
		t.Errorf("view: %s", view.out)
	}
	lines := call(t, "config", "view", "-o", "jsonl").wants(t, 0).out
	if !strings.HasPrefix(lines, `{"current":true,"name":"test"`) || strings.Count(lines, "\n") != 1 {
		t.Errorf("a line for each context: %s", lines)
	}
	if err := os.Chmod(f.path, 0o640); err != nil { // the point of the test
		t.Fatal(err)
	}
	call(t, "status").wants(t, 2)
	isolate(t, filepath.Join(dir, "none.yaml"))
	if got := call(t, "status").wants(t, 2); !strings.Contains(got.err, "gpuaas dev") {
		t.Errorf("stderr: %s", got.err)
	}
}

func write(t *testing.T, path, content string, mode os.FileMode) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), mode); err != nil {
		t.Fatal(err)
	}
}

func TestCreateWaits(t *testing.T) {
	f := mesh(t)
	stock(f)
	provisioning := workspace(commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING)
	always(f, "GetWorkspace", &readmodelv1.GetWorkspaceResponse{Workspace: provisioning})
	const none, running, waiting, succeeded = commonv1.AttemptState_ATTEMPT_STATE_UNSPECIFIED,
		commonv1.AttemptState_ATTEMPT_STATE_RUNNING,
		commonv1.AttemptState_ATTEMPT_STATE_WAITING, commonv1.AttemptState_ATTEMPT_STATE_SUCCEEDED
	f.watching(func(ctx context.Context, req *readmodelv1.WatchRequest, out send) error {
		for _, frame := range []*readmodelv1.WatchResponse{
			itemFrame("", stepItem("reserve_slot", 0, running)),
			bootstrapped(),
			itemFrame("", stepItem("reserve_slot", 0, waiting)),
			itemFrame("", stepItem("reserve_slot", 0, running)),
			itemFrame("", stepItem("reserve_slot", 0, waiting)),
			// The changes come in the wrong order, and are printed in the right one.
			itemFrame("a", stepItem("launch_box", 1, running)),
			itemFrame("b", stepItem("reserve_slot", 0, succeeded)),
			itemFrame("c", workspaceItem(workspace(commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE))),
		} {
			if err := out(frame); err != nil {
				return err
			}
		}
		return keepOpen(ctx)
	})
	// The end of the last step comes after the workspace's own change, so the client reads the timeline.
	timelines(f, [][]*readmodelv1.TimelineItem{
		{timelineItem(1, "reserve_slot", running), timelineItem(2, "launch_box", none)},
		{timelineItem(1, "reserve_slot", waiting), timelineItem(2, "launch_box", none)},
		{timelineItem(1, "reserve_slot", succeeded), timelineItem(2, "launch_box", running)},
		{timelineItem(1, "reserve_slot", succeeded), timelineItem(2, "launch_box", succeeded)},
	})
	got := call(t, "workspaces", "create", "demo2", "--tenant", "acme", "--wait", "-o", "json").wants(t, 0)
	var object readback
	decode(t, got.out, &object)
	if object.State != "active" || len(object.Endpoints) != 1 || object.Endpoints[0].URL != "http://127.0.0.1:4000" {
		t.Errorf("printed %+v", object)
	}
	want := "create " + runID + " (epoch 2199023255559)\n" +
		"  step 1/2 reserve_slot: running\n  step 1/2 reserve_slot: waiting\n  step 1/2 reserve_slot: succeeded in 1s\n  " +
		"step 2/2 launch_box: running\n" +
		"  step 2/2 launch_box: succeeded in 1s\n"
	if got.err != want {
		t.Errorf("stderr (-want +got):\n%s", cmp.Diff(want, got.err))
	}
	for _, req := range sent[*readmodelv1.GetWorkspaceRequest](f) {
		if req.GetMinPos() != "2:77" {
			t.Errorf("read without the position of the command: %v", req)
		}
	}
	if reqs := sent[*readmodelv1.WatchRequest](f); len(reqs) != 1 || reqs[0].GetMinPos() != "2:77" ||
		reqs[0].GetWorkspace() != workspaceID {
		t.Errorf("watched %v", reqs)
	}
}

type readback struct {
	State     string
	Endpoints []struct{ URL string }
}

func TestCreateEndsFailed(t *testing.T) {
	f := mesh(t)
	stock(f)
	failed := workspace(commonv1.WorkspaceState_WORKSPACE_STATE_FAILED)
	failed.LastError, failed.LastErrorCode = "the box did not start", "launch_failed"
	always(f, "GetWorkspace", &readmodelv1.GetWorkspaceResponse{Workspace: failed})
	got := call(t, "workspaces", "create", "demo2", "--tenant", "acme", "--wait", "-o", "json").wants(t, 5)
	var object readback
	decode(t, got.out, &object)
	if object.State != "failed" || !strings.Contains(got.err, `"reason":"launch_failed"`) ||
		!strings.Contains(got.err, "the box did not start") {
		t.Errorf("stdout %s\nstderr %s", got.out, got.err)
	}
	if strings.Contains(got.err, "--min-uptime") {
		t.Errorf("the hint is another failure's: %s", got.err)
	}
	failed.LastError = "workload main ended before it was ready: exited with status 0"
	if got = call(t, "workspaces", "create", "demo2", "--tenant", "acme", "--wait").wants(t, 5); !strings.Contains(got.err,
		"--min-uptime 0s") {
		t.Errorf("the hint does not name --min-uptime: %s", got.err)
	}
	help := call(t, "workspaces", "create", "--help").wants(t, 0)
	if strings.Contains(help.out, "not ready, and is restarted") ||
		!strings.Contains(help.out, "unless it exited with status 0") {
		t.Errorf("the help does not say what the restart policy does: %s", help.out)
	}
}

// TestWaitSurvives: a wait survives a broken watch, resumes it where it stopped, and polls in between.
func TestWaitSurvives(t *testing.T) {
	f := mesh(t)
	stock(f)
	state := commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING
	answer(f, "GetWorkspace", func(*readmodelv1.GetWorkspaceRequest) (*readmodelv1.GetWorkspaceResponse, error) {
		return &readmodelv1.GetWorkspaceResponse{Workspace: workspace(state)}, nil
	})
	streams := 0
	f.watching(func(ctx context.Context, req *readmodelv1.WatchRequest, out send) error {
		streams++
		switch streams {
		case 1:
			if err := out(itemFrame("token-1", workspaceItem(workspace(state)))); err != nil {
				return err
			}
			return fault.New(commonv1.Reason_REASON_SERVER_DRAINING, "")
		case 2:
			if req.GetResumeToken() != "token-1" {
				t.Errorf("resumed with %q", req.GetResumeToken())
			}
			return fault.New(commonv1.Reason_REASON_RESUME_TOKEN_EXPIRED, "")
		default:
			if req.GetResumeToken() != "" {
				t.Errorf("a new snapshot was asked for with %q", req.GetResumeToken())
			}
			if err := out(itemFrame("t", workspaceItem(workspace(commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE)))); err != nil {
				return err
			}
			return keepOpen(ctx)
		}
	})
	got := call(t, "workspaces", "wait", "demo2", "--for", "state=active", "--timeout", "20s", "-o", "name").wants(t, 0)
	if got.out != "acme/demo2\n" || streams != 3 {
		t.Errorf("printed %q after %d streams", got.out, streams)
	}

	// Without any watch it polls.
	f.watching(nil)
	asked := 0
	answer(f, "GetWorkspace", func(*readmodelv1.GetWorkspaceRequest) (*readmodelv1.GetWorkspaceResponse, error) {
		asked++
		if asked < 3 {
			return &readmodelv1.GetWorkspaceResponse{Workspace: workspace(state)}, nil
		}
		return &readmodelv1.GetWorkspaceResponse{Workspace: workspace(commonv1.WorkspaceState_WORKSPACE_STATE_FAILED)}, nil
	})
	call(t, "workspaces", "wait", "demo2", "--for", "state=active,failed", "--timeout", "20s").wants(t, 0)

	// The error of a wait that takes too long gives the last state.
	always(f, "GetWorkspace", &readmodelv1.GetWorkspaceResponse{Workspace: workspace(state)})
	got = call(t, "workspaces", "wait", "demo2", "--timeout", "8s", "-o", "json").wants(t, 6)
	if !strings.Contains(got.err, `"code":"deadline_exceeded"`) || !strings.Contains(got.err, "it is provisioning") ||
		got.out != "" {
		t.Errorf("stdout %q, stderr %s", got.out, got.err)
	}

	// The client does not wait for a condition that can never hold, nor for a workspace that does not exist.
	always(
		f, "GetWorkspace", &readmodelv1.GetWorkspaceResponse{
			Workspace: workspace(commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED),
		},
	)
	call(t, "workspaces", "wait", "demo2").wants(t, 5)
	refuse(f, "GetWorkspace", fault.New(commonv1.Reason_REASON_NOT_FOUND, ""))
	call(t, "workspaces", "wait", "demo2").wants(t, 3)
}

// TestWaitEndsWhereNothingLeadsOn: a failed or stuck workspace with no operation under way stays so, and the wait fails
// at once; if an operation has begun that the view lacks, the client waits for it.
func TestWaitEndsWhereNothingLeadsOn(t *testing.T) {
	f := mesh(t)
	stock(f)
	can := func(kind commonv1.OperationKind, possible bool) {
		always(f, "GetActions", &readmodelv1.GetActionsResponse{Actions: []*lifecyclev1.ActionOption{{
			Kind:     kind,
			Possible: possible,
		}}})
	}
	cancel, retryUndo := commonv1.OperationKind_OPERATION_KIND_CANCEL, commonv1.OperationKind_OPERATION_KIND_RETRY_UNDO
	failed, stuck := workspace(commonv1.WorkspaceState_WORKSPACE_STATE_FAILED),
		workspace(commonv1.WorkspaceState_WORKSPACE_STATE_STUCK)
	failed.LastError, failed.LastErrorCode = "the box did not start", "launch_failed"
	ends := func(w *readmodelv1.Workspace, reason, condition string) {
		t.Helper()
		always(f, "GetWorkspace", &readmodelv1.GetWorkspaceResponse{Workspace: w})
		got := call(t, "workspaces", "wait", "demo2", "--for", condition, "--timeout", "10s").wants(t, 5)
		if !strings.Contains(got.err, "error: "+reason+": ") || strings.Contains(got.err, "goes on") ||
			!strings.Contains(got.err, "gpuaas workspaces actions acme/demo2") {
			t.Errorf("--for %s: %s", condition, got.err)
		}
	}
	can(cancel, false)
	ends(failed, "launch_failed", "state=active")
	ends(failed, "launch_failed", "user_state=temporary")
	refuse(f, "GetActions", fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, ""))
	ends(failed, "launch_failed", "state=active")
	can(retryUndo, true)
	ends(stuck, "precondition_failed", "state=active,failed")
	call(t, "workspaces", "wait", "demo2", "--for", "state=stuck").wants(t, 0)

	can(cancel, true)
	always(f, "GetWorkspace", &readmodelv1.GetWorkspaceResponse{Workspace: failed})
	f.watching(func(ctx context.Context, _ *readmodelv1.WatchRequest, out send) error {
		if err := out(itemFrame("t", workspaceItem(workspace(commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE)))); err != nil {
			return err
		}
		return keepOpen(ctx)
	})
	call(t, "workspaces", "wait", "demo2", "--timeout", "0").wants(t, 0)
}

// TestFenceAsksTheOwner: the view may be behind a reactivation, so the question shows the view's state and the owner
// decides.
func TestFenceAsksTheOwner(t *testing.T) {
	for verb, state := range map[string]commonv1.NodeIdentityState{
		"fence":  commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED,
		"retire": commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED,
	} {
		f := destructible(t)
		always(f, "GetNode", &readmodelv1.GetNodeResponse{Node: &readmodelv1.Node{
			NodeId: nodeID, Name: "node-1",
			Identity: &recoveryv1.NodeIdentity{State: state},
		}})
		got, shown := asked(t, types(t, "node-1\n"), "nodes", verb, "node-1", "--reason", "r")
		if got.code != 0 || acted(f) != 1 || !strings.Contains(shown, "Its identity is "+verb) {
			t.Errorf("%s: exit %d, %d acts\n%s%s", verb, got.code, acted(f), shown, got.err)
		}
	}
}

// TestBadValuesAreRefused: no request is sent, and the message describes what was wrong.
func TestBadValuesAreRefused(t *testing.T) {
	f := mesh(t)
	stock(f)
	for line, want := range map[string]string{
		"workspaces escalate demo2 --out -":                                              "a file named - is ./-",
		"nodes list --limit -1":                                                          "--limit -1: it is 1 or more",
		"nodes enroll --name rack1 --gpus -2 -o json":                                    "--gpus -2: it is from 0 to 64",
		"policy set node.heartbeat_stale_after_seconds -5":                               "stands after --",
		"events show -1":                                                                 "stands after --",
		"workspaces create a --tenant acme --storage 9999P":                              `"9999P"`,
		"nodes probe node-1 --timeout -5s":                                               "--timeout -5s: it is 0 or longer",
		"workspaces wait demo2 --for state=active --timeout -1s":                         "--timeout -1s: it is 0 or longer",
		"nodes list --request-timeout -1s":                                               "-1s: it is 0 or longer",
		"workspaces create a --tenant acme --command sh --env A=x --env A=y":             "--env names A twice",
		"workspaces create a --tenant acme --command sh --port 99999":                    "from 0 to 65535",
		"workspaces create a --tenant acme --command sh --port=-1":                       "from 0 to 65535",
		"workspaces create a --tenant acme --command sh --env SECRET=hidden --env =both": "--env needs NAME=VALUE",
	} {
		before := len(f.requests)
		if got := call(t, strings.Fields(line)...).wants(t, 2); !strings.Contains(got.err, want) ||
			strings.Contains(got.err, "strconv") || len(f.requests) != before {
			t.Errorf("%s: %d requests, %s", line, len(f.requests)-before, got.err)
		}
	}
	if _, err := os.Lstat("-"); err == nil {
		t.Errorf("there is a file named -: %v", os.Remove("-"))
	}
}

// TestProbe: each state is printed once, with its time; the exit code depends on how the task ended.
func TestProbe(t *testing.T) {
	f := mesh(t)
	queued, delivered := commonv1.TaskState_TASK_STATE_QUEUED, commonv1.TaskState_TASK_STATE_DELIVERED
	always(f, "ProbeNode", &readmodelv1.ProbeNodeResponse{Task: &lifecyclev1.Task{
		TaskId: taskID, NodeId: nodeID,
		State: queued,
	}, Pos: "3"})
	for _, tt := range []struct {
		end  commonv1.TaskState
		code int
	}{
		{commonv1.TaskState_TASK_STATE_SUCCEEDED, 0},
		{commonv1.TaskState_TASK_STATE_FAILED, 1},
		{commonv1.TaskState_TASK_STATE_EXPIRED, 1},
	} {
		always(f, "GetTask", &readmodelv1.GetTaskResponse{Task: task(queued, queued)})
		f.watching(func(ctx context.Context, req *readmodelv1.WatchRequest, out send) error {
			if req.GetNode() != nodeID || req.GetMinPos() != "3" {
				t.Errorf("watched %v", req)
			}
			for _, got := range []*readmodelv1.Task{
				task(queued, queued), task(delivered, queued, delivered),
				task(tt.end, queued, delivered, tt.end),
			} {
				if err := out(itemFrame("t", &readmodelv1.WatchItem{Object: &readmodelv1.WatchItem_Task{Task: got}})); err != nil {
					return err
				}
				if err := out(bootstrapped()); err != nil {
					return err
				}
			}
			return keepOpen(ctx)
		})
		got := call(t, "nodes", "probe", "node-1").wants(t, tt.code)
		lines := strings.Split(strings.TrimSpace(got.out), "\n")
		if len(lines) != 3 || lines[0] != "03:04:00.500 +0s queued" ||
			lines[1] != "03:04:01.500 +1s delivered (session epoch 3, attempt 1)" {
			t.Errorf("printed %q", lines)
		}
		asJSON := call(t, "nodes", "probe", "node-1", "-o", "json", "--jq", ".task_id").wants(t, tt.code)
		if asJSON.out != taskID+"\n" {
			t.Errorf("printed %q", asJSON.out)
		}
	}
	// A task that ended before the watch began is in no snapshot, so the client polls it.
	f.watching(func(ctx context.Context, _ *readmodelv1.WatchRequest, out send) error {
		if err := out(bootstrapped()); err != nil {
			return err
		}
		return keepOpen(ctx)
	})
	always(f, "GetTask", &readmodelv1.GetTaskResponse{Task: task(commonv1.TaskState_TASK_STATE_SUCCEEDED, queued,
		commonv1.TaskState_TASK_STATE_SUCCEEDED)})
	call(t, "nodes", "probe", "node-1").wants(t, 0)
	always(f, "GetTask", &readmodelv1.GetTaskResponse{Task: task(queued, queued)})
	call(t, "nodes", "probe", "node-1", "--timeout", "50ms").wants(t, 6)
}

// TestWatchEnds: a watch prints its changes until the person ends it, which prints one line and exits 130.
func TestWatchEnds(t *testing.T) {
	f := mesh(t)
	stock(f)
	ctx, cancel := context.WithCancel(t.Context())
	f.watching(func(ctx context.Context, _ *readmodelv1.WatchRequest, out send) error {
		item := &readmodelv1.WatchItem{
			Topic: readmodelv1.Topic_TOPIC_NODES, Change: readmodelv1.Change_CHANGE_SNAPSHOT,
			Id: nodeID, Object: &readmodelv1.WatchItem_Node{Node: node()},
		}
		if err := out(itemFrame("a", item)); err != nil {
			return err
		}
		if err := out(itemFrame("b", proto.CloneOf(item))); err != nil {
			return err
		}
		cancel()
		return keepOpen(ctx)
	})
	got := callIn(ctx, nil, "nodes", "watch", "-o", "jsonl")
	if got.code != 130 || strings.Count(got.err, "\n") != 1 || !strings.Contains(got.err, `"reason":"cancelled"`) {
		t.Fatalf("exit %d: %s", got.code, got.err)
	}
	for line := range strings.Lines(got.out) {
		var object struct {
			Change, Topic string
			Node          struct{ Name string }
		}
		decode(t, line, &object)
		if object.Change != "snapshot" || object.Topic != "nodes" || object.Node.Name != "node-1" {
			t.Errorf("printed %s", line)
		}
	}
}
