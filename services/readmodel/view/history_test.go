package view_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/project"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// Runs that a reset archives can still be read: each run stays in the list, and its attempts are read by its id.
func TestFormerRunsAreListedAndRead(t *testing.T) {
	k := newKit(t)
	timeline := func(scope list.Scope, ref, run string) (*readmodelv1.GetTimelineResponse, error) {
		t.Helper()
		var out *readmodelv1.GetTimelineResponse
		err := k.read(scope, func(ctx context.Context, s *view.Snapshot) error {
			var err error
			out, err = s.Timeline(ctx, ref, run)
			return err
		})
		return out, err
	}
	at := timestamppb.New(k.Now().Add(-time.Hour))
	end := timestamppb.New(at.AsTime().Add(time.Minute))
	const do, undo = commonv1.Direction_DIRECTION_DO, commonv1.Direction_DIRECTION_UNDO
	run := func(kind commonv1.OperationKind, state commonv1.RunState) *lifecyclev1.Run {
		r := &lifecyclev1.Run{
			RunId: ids.New(), WorkspaceId: k.A.WorkspaceID, TenantId: k.A.ID, Kind: kind, State: state, CreatedAt: at,
			StepNames: []string{"Validate request", "Allocate storage", "Mark active"},
		}
		if state == commonv1.RunState_RUN_STATE_FAILED {
			r.FinishedAt, r.Error, r.ErrorCode, r.ErrorLayer = end, "no disk is free", "storage_failed",
				commonv1.OwnerLayer_OWNER_LAYER_RUNTIME
		}
		return r
	}
	step := func(r *lifecyclev1.Run, n int32, d commonv1.Direction, attempt int32, state commonv1.AttemptState) {
		k.Append(&lifecyclev1.StepAttempt{
			RunId: r.GetRunId(), WorkspaceId: k.A.WorkspaceID, Step: n, Name: r.GetStepNames()[n], Direction: d,
			Attempt: attempt, State: state, StartedAt: at,
		})
	}
	const succeeded, failed = commonv1.AttemptState_ATTEMPT_STATE_SUCCEEDED, commonv1.AttemptState_ATTEMPT_STATE_FAILED
	create, retry := commonv1.OperationKind_OPERATION_KIND_CREATE, commonv1.OperationKind_OPERATION_KIND_RETRY

	first := run(create, commonv1.RunState_RUN_STATE_FAILED)
	k.Append(first)
	step(first, 0, do, 1, succeeded)
	step(first, 1, do, 1, commonv1.AttemptState_ATTEMPT_STATE_LOST)
	step(first, 1, do, 2, failed)
	step(first, 1, undo, 1, failed) // its undo went wrong once, which is not where it stopped
	step(first, 1, undo, 2, succeeded)
	between := run(retry, commonv1.RunState_RUN_STATE_FAILED) // cancelled after a step that was done, though not at once
	k.Append(between)
	step(between, 0, do, 1, failed)
	step(between, 0, do, 2, succeeded)
	standing := run(retry, commonv1.RunState_RUN_STATE_RUNNING)
	k.Append(standing)
	step(standing, 0, do, 1, failed) // it will try again
	k.Append(&lifecyclev1.Workspace{
		WorkspaceId: k.A.WorkspaceID, TenantId: k.A.ID, Tenant: k.A.Name, Name: k.A.WorkspaceName,
		State: commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING,
		RunId: standing.GetRunId(),
	})
	k.sync()

	type brief struct {
		Run, Kind, State, Failed, Code string
		Ended, Shown                   bool
	}
	briefs := func(out *readmodelv1.GetTimelineResponse) []brief {
		var briefs []brief
		for _, b := range out.GetHistory() {
			if b.GetStartedAt() == nil {
				t.Errorf("run %s began at no time", b.GetRunId())
			}
			briefs = append(briefs, brief{
				b.GetRunId(), names.Of(b.GetKind()), names.Of(b.GetState()), b.GetFailedStep(), b.GetErrorCode(),
				b.GetEndedAt() != nil, b.GetShown(),
			})
		}
		return briefs
	}
	want := []brief{
		{standing.GetRunId(), "retry", "running", "", "", false, true},
		{between.GetRunId(), "retry", "failed", "", "storage_failed", true, false},
		{first.GetRunId(), "create", "failed", "Allocate storage", "storage_failed", true, false},
		{k.A.RunID, "create", "running", "", "", false, false},
	}
	own := scopeOf(t, k.A.ID)
	out, err := timeline(own, k.A.WorkspaceName, "")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, briefs(out)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if items := out.GetItems(); len(items) != 3 || items[0].GetRunId() != standing.GetRunId() {
		t.Errorf("the standing run's items: %v", items)
	}
	want[0].Shown, want[2].Shown = false, true
	out, err = timeline(own, k.A.WorkspaceName, first.GetRunId())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, briefs(out)); diff != "" {
		t.Errorf("a former run (-want +got):\n%s", diff)
	}
	if items := out.GetItems(); len(items) != 6 || items[0].GetRunId() != first.GetRunId() ||
		items[2].GetState() != failed || items[5].GetDirection() != undo {
		t.Errorf("a former run's items: %v", items)
	}

	// A run of another workspace is not found, whatever the scope.
	for name, id := range map[string]string{"unknown": ids.New(), "another workspace's": k.B.RunID, "no id": "first"} {
		for _, scope := range []list.Scope{own, list.All()} {
			_, err := timeline(scope, k.A.WorkspaceID, id)
			f, ok := fault.As(err)
			if !ok || f.Reason != commonv1.Reason_REASON_NOT_FOUND || f.Remedy == "" {
				t.Errorf("%s run: %v", name, err)
			}
		}
	}
}

// Scenario: one of two runs has more attempts than one statement reads. All attempts of both runs are returned, each
// once and in order, and the timeline of the run has all of its own.
func TestNoAttemptOfARunIsLeftOut(t *testing.T) {
	k := newKit(t)
	const failures = 10001
	_, err := k.DB.Pool(pg.RoleReadmodel).Exec(testkit.Context(t), `
		INSERT INTO readmodel.step (run_id, step, direction, attempt, version, workspace_id, stalled, body)
		SELECT $1::uuid, 1, 'undo', i, 1, $2::uuid, false, jsonb_build_object('run_id', $1::text, 'workspace_id', $2::text,
			'step', 1, 'direction', 'DIRECTION_UNDO', 'attempt', i, 'state', 'ATTEMPT_STATE_FAILED')
		FROM generate_series(1, $3::integer) i`, k.A.RunID, k.A.WorkspaceID, failures)
	if err != nil {
		t.Fatal(err)
	}
	var steps []*lifecyclev1.StepAttempt
	var timeline *readmodelv1.GetTimelineResponse
	err = k.read(list.All(), func(ctx context.Context, s *view.Snapshot) error {
		var err error
		steps, err = s.Steps(ctx, []string{k.B.RunID, k.A.RunID})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	err = k.read(list.All(), func(ctx context.Context, s *view.Snapshot) error { // a read has 10 s
		var err error
		timeline, err = s.Timeline(ctx, k.A.WorkspaceID, "")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	ofRun, seen := map[string]int{}, map[string]bool{}
	for n, a := range steps {
		ofRun[a.GetRunId()]++
		id := project.StepID(a)
		if seen[id] {
			t.Errorf("%s is returned twice", id)
		}
		seen[id] = true
		if a.GetState() == commonv1.AttemptState_ATTEMPT_STATE_FAILED && a.GetAttempt() > 1 &&
			steps[n-1].GetAttempt() != a.GetAttempt()-1 {
			t.Fatalf("attempt %d follows on attempt %d", a.GetAttempt(), steps[n-1].GetAttempt())
		}
	}
	if ofRun[k.A.RunID] != failures+2 || ofRun[k.B.RunID] != 2 {
		t.Errorf("%d attempts of the run with %d, and %d of the one with 2", ofRun[k.A.RunID], failures+2, ofRun[k.B.RunID])
	}
	if got := len(timeline.GetItems()); got != failures+3 { // with a step that has not begun
		t.Errorf("a timeline of %d items, want %d", got, failures+3)
	}
}
