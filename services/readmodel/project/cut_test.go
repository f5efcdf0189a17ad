package project_test

import (
	"context"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/project"
	"github.com/gpuaas/mesh/services/readmodel/project/projecttest"
)

// fakeOwner announces messages with their versions, one a call, and projects them as a replica of readmodel does
// meanwhile.
type fakeOwner struct {
	log       *projecttest.Log
	projector *project.Projector
	rows      []version
	announced int
	midway    func() // called once two rows have been announced
}

type version struct {
	m proto.Message
	v int64
}

func (f *fakeOwner) AnnounceRows(ctx context.Context,
	req *commonv1.AnnounceRowsRequest,
) (*commonv1.AnnounceRowsResponse, error) {
	if f.announced == 2 {
		f.midway()
	}
	if f.announced == len(f.rows) {
		return &commonv1.AnnounceRowsResponse{}, nil
	}
	row := f.rows[f.announced]
	f.announced++
	token := f.log.AppendVersion(row.m, row.v)
	f.log.Number()
	return &commonv1.AnnounceRowsResponse{Rows: 1, Next: "next", Pos: token}, f.projector.Drain(ctx)
}

// snapshot returns every projected row, by its key.
func snapshot(t *testing.T, l *projecttest.Log) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, table := range []string{
		"node", "gate", "session", "tenant", "workspace", "run", "step", "allocation", "instance", "claim", "task", "finding",
		"recovery_record", "incident", "brake", "observed", "task_transition", "verdict", "verdict_period",
	} {
		out[table] = text(t, l, `SELECT COALESCE(string_agg(x::text, E'\n' ORDER BY x::text), '') FROM readmodel.`+table+` x`)
	}
	return out
}

// cutEvents cuts all events that may be cut, whatever their age.
func cutEvents(t *testing.T, l *projecttest.Log) {
	t.Helper()
	ctx := testkit.Context(t)
	_, err := l.DB.Pool(pg.RoleRecovery).Exec(ctx,
		`INSERT INTO mesh.policy (key, value, updated_by) VALUES ('retention.events_seconds', '0', 'test')
		ON CONFLICT (key) DO NOTHING`)
	must(t, err)
	for again := true; again && err == nil; { // a call that has begun a day of the log cuts nothing
		err = l.DB.Pool(pg.RoleReadmodel).QueryRow(ctx, `SELECT x.next IS NOT NULL
			FROM events.cut_events('0', '00000000-0000-0000-0000-000000000000', 100000) x`).Scan(&again)
	}
	must(t, err)
}

// TestAProjectionIsMadeAgainAfterACut checks that after events were cut a rebuild takes the rows that the owners
// announce and those that the remaining events name, keeps the rows that are over, and drops the others; and that a
// check compares the rows that the remaining events name.
func TestAProjectionIsMadeAgainAfterACut(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	l := projecttest.New(t)
	p := l.Projector()
	tenant := &lifecyclev1.Tenant{TenantId: ids.New(), Name: "alpha"}
	workspace := &lifecyclev1.Workspace{
		WorkspaceId: ids.New(), TenantId: tenant.GetTenantId(), Tenant: "alpha", Name: "trainer",
		State: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, Epoch: 2,
	}
	created := &lifecyclev1.Run{
		RunId: ids.New(), WorkspaceId: workspace.GetWorkspaceId(), TenantId: tenant.GetTenantId(),
		State: commonv1.RunState_RUN_STATE_SUCCEEDED,
		ChangedSteps: []*lifecyclev1.StepAttempt{{
			WorkspaceId: workspace.GetWorkspaceId(), Name: "deploy", Direction: commonv1.Direction_DIRECTION_DO, Attempt: 1,
			Version: 3,
			State:   commonv1.AttemptState_ATTEMPT_STATE_SUCCEEDED,
		}},
	}
	created.ChangedSteps[0].RunId = created.GetRunId()
	ended := &lifecyclev1.Instance{
		InstanceId: ids.New(), WorkspaceId: workspace.GetWorkspaceId(),
		State: commonv1.InstanceState_INSTANCE_STATE_ENDED, Epoch: 1,
	}
	live := &lifecyclev1.Instance{
		InstanceId: ids.New(), WorkspaceId: workspace.GetWorkspaceId(),
		State: commonv1.InstanceState_INSTANCE_STATE_LIVE, Epoch: 2,
	}
	task := &lifecyclev1.TaskChanged{
		Task: &lifecyclev1.Task{
			TaskId: ids.New(), NodeId: ids.New(), State: commonv1.TaskState_TASK_STATE_RUNNING,
			Attempt: 1,
		},
		Transitions: []*lifecyclev1.TaskTransition{
			{State: commonv1.TaskState_TASK_STATE_DISPATCHED},
			{State: commonv1.TaskState_TASK_STATE_RUNNING},
		},
	}
	session := &nodev1.SessionChanged{
		SessionId: ids.New(), NodeId: task.GetTask().GetNodeId(), Generation: 1,
		State: commonv1.SessionState_SESSION_STATE_ADMITTED,
	}
	for _, m := range []proto.Message{tenant, workspace, created, ended, live, task, session} {
		l.AppendVersion(m, 4)
	}
	l.Number()
	must(t, p.Drain(ctx))
	// The newest event, which is never cut, names a session again.
	session.ReplicaId = ids.New()
	l.AppendVersion(session, 5)
	l.Number()
	must(t, p.Drain(ctx))
	cutEvents(t, l)
	want := snapshot(t, l)
	report, err := p.Verify(ctx)
	if err != nil || !report.Cut || !report.Equal() {
		t.Fatalf("a check after the cut: %+v, %v", report, err)
	}
	if _, err := p.Rebuild(ctx); fault.ReasonOf(err) != commonv1.Reason_REASON_PRECONDITION_FAILED {
		t.Fatalf("a rebuild without owners: %v, want a refusal", err)
	}

	// Rows that are wrong, that are missing, or that no event and no owner names.
	for sql, args := range map[string][]any{
		`UPDATE readmodel.workspace SET name = 'other', version = 9 WHERE workspace_id = $1`: {workspace.GetWorkspaceId()},
		`DELETE FROM readmodel.instance WHERE instance_id = $1`:                              {live.GetInstanceId()},
		`UPDATE readmodel.session SET replica_id = NULL WHERE session_id = $1`:               {session.GetSessionId()},
		`INSERT INTO readmodel.run VALUES ($1, 1, $1, NULL, true, '{}')`:                     {ids.New()},
	} {
		_, err := l.DB.Pool(pg.RoleReadmodel).Exec(ctx, sql, args...)
		must(t, err)
	}
	report, err = p.Verify(ctx)
	must(t, err)
	differs := []project.Difference{{Table: "session", Missing: 1, Surplus: 1, Example: session.GetSessionId()}}
	if diff := cmp.Diff(differs, report.Differences); diff != "" {
		t.Errorf("what events still tell differs (-want +got):\n%s", diff)
	}
	owner := &fakeOwner{log: l, projector: p, rows: []version{
		{tenant, 4}, {workspace, 4}, {live, 4}, {&lifecyclev1.TaskChanged{Task: task.GetTask()}, 4},
	}}
	owner.midway = func() { cutEvents(t, l) } // the events that the rebuild still needs are kept
	report, err = p.Rebuild(ctx, owner)
	must(t, err)
	if !report.Cut || report.Announced != 4 {
		t.Errorf("the rebuild reports %+v", report)
	}
	if diff := cmp.Diff(want, snapshot(t, l)); diff != "" {
		t.Errorf("after the rebuild (-want +got):\n%s", diff)
	}
	if report, err := p.Verify(ctx); err != nil || !report.Equal() {
		t.Errorf("a check after the rebuild: %+v, %v", report, err)
	}
	if n := text(t, l, `SELECT count(*)::text FROM readmodel.event_cursor
		WHERE name LIKE 'projections.rebuild%'`); n != "0" {
		t.Errorf("%s cursors of the rebuild are left", n)
	}
	if n := text(t, l, `SELECT ((SELECT count(*) FROM readmodel.scratch_workspace) + (SELECT count(*)
		FROM readmodel.scratch_session))::text`); n != "0" {
		t.Errorf("%s scratch rows are left", n)
	}
}
