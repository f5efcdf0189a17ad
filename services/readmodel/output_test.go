package readmodel_test

import (
	"context"
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
	"github.com/gpuaas/mesh/internal/testkit"
)

// viewers are people of each kind, and whether they may see what a workload of tenant A has written.
func (k *kit) viewers() map[string]struct {
	token string
	sees  bool
} {
	type viewer = struct {
		token string
		sees  bool
	}
	return map[string]viewer{
		"operator":            {k.token("", "operator", "viewer"), true},
		"security":            {k.token("", "security"), false},
		"viewer":              {k.token("", "viewer"), false},
		"viewer and security": {k.token("", "viewer", "security"), false},
		"person of A":         {k.token(k.A.ID, "tenant"), true},
		"viewer of A":         {k.token(k.A.ID, "viewer"), true},
	}
}

// TestLastOutputIsForTheTenantAndOperators checks the timeline, watches (snapshot and change) and the escalation
// bundle.
func TestLastOutputIsForTheTenantAndOperators(t *testing.T) {
	k := newKit(t)
	const output = "ModuleNotFoundError: OUTPUTCANARY"
	attempt := &lifecyclev1.StepAttempt{
		RunId: k.A.RunID, WorkspaceId: k.A.WorkspaceID, Step: 1, Name: "Wait for workloads ready",
		Direction: commonv1.Direction_DIRECTION_DO, Attempt: 1, State: commonv1.AttemptState_ATTEMPT_STATE_FAILED,
		Error: "exited with status 1", ErrorCode: "workload_crash_loop", ErrorLayer: commonv1.OwnerLayer_OWNER_LAYER_WORKLOAD,
		Cause: "a cause for the operator", LastOutput: output,
	}
	last := k.Append(attempt)
	k.awaitProjected()
	for name, v := range k.viewers() {
		timeline, err := k.query(v.token).GetTimeline(testkit.Context(t),
			&readmodelv1.GetTimelineRequest{Workspace: k.A.WorkspaceID, MinPos: last})
		k.check(err)
		item := timeline.GetItems()[1]
		if item.GetError() != "exited with status 1" || (item.GetLastOutput() == output) != v.sees || !v.sees &&
			item.GetLastOutput() != "" {
			t.Errorf("the %s reads %q under %q", name, item.GetLastOutput(), item.GetError())
		}
		if !strings.Contains(item.GetLikelyCause(), "tenant's workload") ||
			!strings.Contains(item.GetAdvice(), "not the platform's") {
			t.Errorf("the advice names another than the workload: %s; %s", item.GetLikelyCause(), item.GetAdvice())
		}
		for _, when := range []string{"snapshot", "change"} {
			got := k.watchedStep(v.token, when == "change", attempt)
			if (got.GetLastOutput() == output) != v.sees || !v.sees && got.GetLastOutput() != "" {
				t.Errorf("the %s is sent %q by a watch (%s)", name, got.GetLastOutput(), when)
			}
			if tenant := strings.HasSuffix(name, "of A"); tenant != (got.GetCause() == "") {
				t.Errorf("the %s is sent the cause %q by a watch (%s)", name, got.GetCause(), when)
			}
		}
		files, err := k.escalate(v.token, k.A.WorkspaceID)
		if err != nil && name != "operator" && name != "person of A" {
			continue // these people may not collect a bundle
		}
		k.check(err)
		for file, content := range files {
			if strings.Contains(string(content), "OUTPUTCANARY") && !v.sees {
				t.Errorf("the %s finds the output in %s", name, file)
			}
		}
		for _, file := range []string{"timeline.json", "summary.json"} {
			if got := strings.Contains(string(files[file]), "OUTPUTCANARY"); got != v.sees {
				t.Errorf("the %s finds the output in %s: %v", name, file, got)
			}
		}
	}
}

// watchedStep returns the step as a watch sends it: in its snapshot, or as a change after it.
func (k *kit) watchedStep(token string, change bool, attempt *lifecyclev1.StepAttempt) *lifecyclev1.StepAttempt {
	k.t.Helper()
	ctx, cancel := context.WithCancel(testkit.Context(k.t))
	defer cancel()
	stream, err := k.query(token).Watch(ctx, &readmodelv1.WatchRequest{
		Topics: []readmodelv1.Topic{readmodelv1.Topic_TOPIC_STEPS}, Workspace: k.A.WorkspaceID,
	})
	k.check(err)
	defer func() { _ = stream.Close() }()
	bootstrapped := false
	for stream.Receive() {
		frame := stream.Msg()
		if frame.GetBootstrapped() != nil {
			bootstrapped = true
			if change {
				k.Append(attempt)
			}
		}
		if a := frame.GetItem().GetStep(); a.GetStep() == attempt.GetStep() && a.GetAttempt() == attempt.GetAttempt() &&
			bootstrapped == change {
			return a
		}
	}
	k.t.Fatalf("the watch ended: %v", stream.Err())
	return nil
}

// TestOutputIsReadByTheTenantAndOperators: a request of any other person does not reach lifecycle, and another tenant's
// workspace gets the answer for one that does not exist.
func TestOutputIsReadByTheTenantAndOperators(t *testing.T) {
	k := newKit(t)
	for name, v := range k.viewers() {
		k.owners.take()
		res, err := k.query(v.token).ReadOutput(testkit.Context(t),
			&readmodelv1.ReadOutputRequest{Workspace: k.A.WorkspaceID, Previous: true, MaxBytes: 5})
		asked := k.owners.take()
		if !v.sees {
			if rpctest.ReasonOfWire(err) != commonv1.Reason_REASON_PERMISSION_DENIED || len(asked) != 0 {
				t.Errorf("the %s is answered %v, %v; lifecycle was asked %d times", name, res, err, len(asked))
			}
			continue
		}
		if err != nil || string(res.GetOutput().GetData()) != "READCANARY" || res.GetWorkload() != "main" || len(asked) != 1 {
			t.Errorf("the %s is answered %v, %v", name, res, err)
			continue
		}
		if m, ok := asked[0].message.(*lifecyclev1.ReadOutputRequest); !ok || m.GetWorkspaceId() != k.A.WorkspaceID ||
			!m.GetPrevious() || m.GetMaxBytes() != 5 {
			t.Errorf("lifecycle is asked %v", asked[0].message)
		}
	}
	token := k.token(k.A.ID, "tenant")
	k.owners.take()
	read := func(workspace string) string {
		_, err := k.query(token).ReadOutput(testkit.Context(t), &readmodelv1.ReadOutputRequest{Workspace: workspace})
		if rpctest.ReasonOfWire(err) != commonv1.Reason_REASON_NOT_FOUND {
			t.Errorf("workspace %s: %v", workspace, err)
		}
		return strings.ReplaceAll(err.Error(), workspace, "") // which the request itself named
	}
	if foreign, absent := read(k.B.WorkspaceID), read(ids.New()); foreign != absent {
		t.Errorf("another tenant's: %s; an unknown one: %s", foreign, absent)
	}
	if asked := k.owners.take(); len(asked) != 0 {
		t.Errorf("lifecycle is asked %v", asked)
	}
}
