package project_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/project"
	"github.com/gpuaas/mesh/services/readmodel/project/projecttest"
)

func TestMain(m *testing.M) { testkit.Main(m, testkit.CheckLeaks()) }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func text(t *testing.T, l *projecttest.Log, sql string, args ...any) string {
	t.Helper()
	var got string
	must(t, l.DB.Pool(pg.RoleReadmodel).QueryRow(testkit.Context(t), sql, args...).Scan(&got))
	return got
}

// The entities come in every order, twice, with an old version last: the row has the highest version, and the rebuild
// has the same.
func TestProjectionKeepsTheHighestVersionInAnyOrderAndEqualsItsRebuild(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	w := projecttest.NewWorld(t)
	p := w.Projector()
	type put struct {
		m       proto.Message
		version int64
	}
	var puts []put
	workspace := &lifecyclev1.Workspace{
		WorkspaceId: w.A.WorkspaceID, TenantId: w.A.ID, Tenant: "alpha", Name: w.A.WorkspaceName,
		State: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, Epoch: 1,
	}
	late := ids.New()
	for v := int64(2); v < 8; v++ {
		workspace.Epoch = v
		puts = append(puts, put{proto.Clone(workspace), v},
			put{&nodev1.SessionChanged{
				SessionId: w.A.SessionID, NodeId: w.A.NodeID, ReplicaId: w.Replica, Generation: 1, Late: v%2 == 0,
				State: commonv1.SessionState_SESSION_STATE_ADMITTED,
			}, v},
			put{&lifecyclev1.TaskChanged{
				Task: &lifecyclev1.Task{
					TaskId: w.A.TaskID, NodeId: w.A.NodeID, State: commonv1.TaskState_TASK_STATE_RUNNING,
					Attempt: int32(v),
				},
				Transitions: []*lifecyclev1.TaskTransition{
					{State: commonv1.TaskState_TASK_STATE_DISPATCHED},
					{State: commonv1.TaskState_TASK_STATE_RUNNING},
				},
			}, v},
			// A workspace whose tenant is not known yet.
			put{&lifecyclev1.Workspace{
				WorkspaceId: late, TenantId: ids.New(), Tenant: "later", Name: "early",
				State: commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING,
			}, v})
	}
	puts = append(puts, puts...)
	rand.Shuffle(len(puts), func(i, j int) { puts[i], puts[j] = puts[j], puts[i] })
	for _, x := range puts {
		w.AppendVersion(x.m, x.version)
	}
	w.Number()
	must(t, p.Drain(ctx))
	for sql, want := range map[string]string{
		"SELECT version || ' ' || (body->>'epoch') FROM readmodel.workspace WHERE workspace_id = '" + w.A.WorkspaceID +
			"'": "7 7",
		"SELECT version || ' ' || serving FROM readmodel.session WHERE session_id = '" + w.A.SessionID +
			"'": "7 true",
		"SELECT version || ' ' || (body->>'attempt') FROM readmodel.task WHERE task_id = '" + w.A.TaskID +
			"'": "7 7",
		"SELECT count(*)::text FROM readmodel.task_transition WHERE task_id = '" + w.A.TaskID +
			"'": "13",
		"SELECT version::text FROM readmodel.workspace WHERE workspace_id = '" + late +
			"'": "7",
	} {
		if got := text(t, w.Log, sql); got != want {
			t.Errorf("%s = %q, want %q", sql, got, want)
		}
	}
	report, err := p.Verify(ctx)
	must(t, err)
	if !report.Equal() || report.Events == 0 {
		t.Fatalf("rebuild differs: %+v", report)
	}

	// A row that was changed by hand is found, and a rebuild corrects it.
	_, err = w.DB.Pool(pg.RoleReadmodel).Exec(ctx,
		"UPDATE readmodel.workspace SET state = 'failed' WHERE workspace_id = $1", late)
	must(t, err)
	report, err = p.Verify(ctx)
	must(t, err)
	want := []project.Difference{{Table: "workspace", Missing: 1, Surplus: 1, Example: late}}
	if diff := cmp.Diff(want, report.Differences); diff != "" {
		t.Fatalf("differences (-want +got):\n%s", diff)
	}
	_, err = p.Rebuild(ctx)
	must(t, err)
	if report, err = p.Verify(ctx); err != nil || !report.Equal() {
		t.Fatalf("after rebuild: %+v, %v", report, err)
	}
}

// TestOfEventsThatWaitTogetherEachRowIsWrittenOnce checks that a run with its steps, all of whose events wait, makes
// one version of each row: the physical position of a row in an empty table shows how many versions were written before
// it.
func TestOfEventsThatWaitTogetherEachRowIsWrittenOnce(t *testing.T) {
	testkit.IO(t)
	l := projecttest.New(t)
	run := &lifecyclev1.Run{
		RunId: ids.New(), WorkspaceId: ids.New(), TenantId: ids.New(),
		State: commonv1.RunState_RUN_STATE_RUNNING,
	}
	attempt := func(step int32, state commonv1.AttemptState, version int64) *lifecyclev1.StepAttempt {
		return &lifecyclev1.StepAttempt{
			RunId: run.GetRunId(), WorkspaceId: run.GetWorkspaceId(), Step: step, Attempt: 1,
			Direction: commonv1.Direction_DIRECTION_DO, State: state, Version: version,
		}
	}
	const steps = 6
	for step := range int32(steps) {
		run.ChangedSteps = []*lifecyclev1.StepAttempt{attempt(step, commonv1.AttemptState_ATTEMPT_STATE_RUNNING, 1)}
		if step > 0 {
			run.ChangedSteps = append(run.ChangedSteps, attempt(step-1, commonv1.AttemptState_ATTEMPT_STATE_SUCCEEDED, 2))
		}
		l.AppendVersion(run, int64(step)+1)
	}
	run.State = commonv1.RunState_RUN_STATE_SUCCEEDED
	run.ChangedSteps = []*lifecyclev1.StepAttempt{attempt(steps-1, commonv1.AttemptState_ATTEMPT_STATE_SUCCEEDED, 2)}
	l.AppendVersion(run, steps+1)
	l.Number()
	p := l.Projector()
	must(t, p.Drain(testkit.Context(t)))
	for sql, want := range map[string]string{
		`SELECT version || ' ' || live || ' ' || ctid FROM readmodel.run`: "7 false (0,1)",
		`SELECT count(*) || ' ' || max(ctid) || ' ' || min(version) || ' ' || min(body->>'state')
			FROM readmodel.step`: "6 (0,6) 2 ATTEMPT_STATE_SUCCEEDED",
	} {
		if got := text(t, l, sql); got != want {
			t.Errorf("%s = %q, want %q", sql, got, want)
		}
	}
	report, err := p.Verify(testkit.Context(t))
	must(t, err)
	if !report.Equal() || report.Events != steps+1 {
		t.Errorf("the rebuild differs: %+v", report)
	}
}

// Scenario: the row of an event that the database would refuse is replaced by a later one that waited with it. It takes
// no effect either way: the projection, its check and its rebuild go on, and say how many events they could not apply.
func TestARefusedRowThatIsReplacedHarmsNothing(t *testing.T) {
	testkit.IO(t)
	l := projecttest.New(t)
	run := &lifecyclev1.Run{
		RunId: ids.New(), WorkspaceId: "no id", TenantId: ids.New(),
		State: commonv1.RunState_RUN_STATE_RUNNING,
	}
	l.AppendVersion(run, 1)
	run.WorkspaceId, run.State = ids.New(), commonv1.RunState_RUN_STATE_SUCCEEDED
	l.AppendVersion(run, 2)
	l.Number()
	p := l.Projector()
	must(t, p.Drain(testkit.Context(t)))
	for range 2 {
		if got := text(t, l, `SELECT version || ' ' || (SELECT count(*) FROM readmodel.parked_event)
			FROM readmodel.run`); got != "2 0" {
			t.Errorf("version and parked events: %q", got)
		}
		report, err := p.Verify(testkit.Context(t))
		must(t, err)
		if !report.Equal() || report.Events != 1 || report.Unapplied != 1 {
			t.Errorf("the check: %+v", report)
		}
		_, err = p.Rebuild(testkit.Context(t))
		must(t, err)
	}
}

func TestPoisonIsParkedAndTheRestGoesOn(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	w := projecttest.NewWorld(t)
	p := w.Projector()
	for _, e := range []events.Event{
		{
			Kind: project.KindWorkspace, AggregateType: "workspace", AggregateID: "x", AggregateVersion: 1,
			Payload: &lifecyclev1.Workspace{Name: "no id"},
		},
		{
			Kind: project.KindWorkspace, AggregateType: "workspace", AggregateID: "x", AggregateVersion: 1,
			Payload: &lifecyclev1.Workspace{WorkspaceId: "no uuid", TenantId: w.A.ID},
		},
		// no version
		{Kind: project.KindGate, AggregateType: "gate", AggregateID: "x", Payload: &lifecyclev1.NodeGate{NodeId: w.Shared}},
		{
			Kind: project.KindTask, AggregateType: "task", AggregateID: "x", AggregateVersion: 1,
			Payload: &lifecyclev1.TaskChanged{Task: &lifecyclev1.Task{TaskId: ids.New(), NodeId: w.Shared}},
		},
	} {
		w.AppendRaw(pg.RoleLifecycle, e)
	}
	w.Append(&lifecyclev1.Tenant{TenantId: ids.New(), Name: "after"})
	w.Number()
	must(t, p.Drain(ctx))
	parked, err := p.Parked(ctx)
	must(t, err)
	if len(parked) != 4 {
		t.Errorf("parked %d events, want 4: %+v", len(parked), parked)
	}
	if got := text(t, w.Log, "SELECT count(*)::text FROM readmodel.tenant WHERE name = 'after'"); got != "1" {
		t.Error("the event after the poison did not take effect")
	}
	if report, err := p.Verify(ctx); err != nil || !report.Equal() || report.Parked != 4 {
		t.Errorf("Verify = %+v, %v", report, err)
	}
}

func TestPositionTokensAreWaitedFor(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	w := projecttest.NewWorld(t)
	p := w.Projector()
	must(t, p.Drain(ctx))
	token := w.Put(&lifecyclev1.Tenant{TenantId: ids.New(), Name: "new"})
	began := time.Now()
	err := p.WaitFor(ctx, token) // no projector runs
	if !fault.Has(err, commonv1.Reason_REASON_POSITION_NOT_REACHED) {
		t.Errorf("WaitFor = %v", err)
	}
	if took := time.Since(began); took > 20*time.Second { // events.MaxWait, with a margin for a slow machine
		t.Errorf("waited %s", took)
	}
	must(t, p.Drain(ctx))
	must(t, p.WaitFor(ctx, token))
	must(t, p.WaitFor(ctx, ""))
	for _, bad := range []string{"x", ids.New()} {
		if err := p.WaitFor(ctx, bad); !fault.Has(err, commonv1.Reason_REASON_INVALID_ARGUMENT) {
			t.Errorf("WaitFor(%q) = %v", bad, err)
		}
	}
	must(t, p.CatchUp(ctx))
}

func TestOldClosedSessionsAreLetGo(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	l := projecttest.New(t)
	p := l.Projector()
	node := ids.New()
	l.Append(&recoveryv1.NodeIdentity{
		NodeId: node, Name: "n",
		State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE,
	})
	for g := int64(1); g <= 30; g++ {
		s := &nodev1.SessionChanged{
			SessionId: ids.New(), NodeId: node, Generation: g,
			State: commonv1.SessionState_SESSION_STATE_ADMITTED, OpenedAt: timestamppb.Now(),
		}
		l.Append(s)
		if g < 30 {
			closed, ok := proto.Clone(s).(*nodev1.SessionChanged)
			if !ok {
				t.Fatal(errors.New("clone"))
			}
			closed.State = commonv1.SessionState_SESSION_STATE_CLOSED
			l.Append(closed)
		}
	}
	l.Number()
	must(t, p.Drain(ctx))
	if got := text(t, l, "SELECT min(generation) || '-' || max(generation) FROM readmodel.session"); got != "22-30" &&
		got != "23-30" {
		t.Errorf("kept %s", got)
	}
	if report, err := p.Verify(ctx); err != nil || !report.Equal() {
		t.Errorf("Verify = %+v, %v", report, err)
	}
}

// A replica of an earlier build versions observations by its own clock: one that is an hour ahead must not hide what
// another replica writes after it.
func TestAnObservationFromAFastClockDoesNotHideLaterOnes(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	l := projecttest.New(t)
	p := l.Projector()
	workspace, node := ids.New(), ids.New()
	for epoch, ahead := range []time.Duration{time.Hour, 0, -time.Minute} {
		l.AppendRaw(pg.RoleNodeAPI, events.Event{
			Kind: project.KindObservation, AggregateType: "observation", AggregateID: workspace,
			AggregateVersion: time.Now().Add(ahead).UnixMicro(),
			Payload:          &nodev1.Observation{WorkspaceId: workspace, Epoch: int64(epoch + 1)},
			Correlation:      events.Correlation{WorkspaceID: workspace, NodeID: node},
		})
	}
	l.Number()
	must(t, p.Drain(ctx))
	if got := text(t, l, "SELECT body->>'epoch' FROM readmodel.observed"); got != "2" {
		t.Errorf("the observation of epoch %s stands, want that of epoch 2, which was made last", got)
	}
}

// Scenario: the body of a machine's row and of an instance's row changes, as it does with each observation. The row
// changes in place: no index of the table gets an entry.
func TestRowsThatChangeOftenChangeInPlace(t *testing.T) {
	testkit.IO(t)
	l := projecttest.New(t)
	node := &recoveryv1.NodeIdentity{
		NodeId: ids.New(), Name: "n1", State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE, WorkspaceId: ids.New(),
	}
	instance := &lifecyclev1.Instance{
		InstanceId: ids.New(), WorkspaceId: ids.New(), TenantId: ids.New(), NodeId: ids.New(),
	}
	p := l.Projector()
	const changes = 5
	for n := range changes + 1 {
		node.StateReason = fmt.Sprintf("reason %d", n)
		instance.EndReason = fmt.Sprintf("reason %d", n)
		l.Append(node)
		l.Append(instance)
		l.Number()
		must(t, p.Drain(testkit.Context(t)))
	}
	for _, table := range []string{"node", "instance"} {
		sql := `SELECT pg_stat_get_tuples_updated(r) || ' ' || pg_stat_get_tuples_hot_updated(r)
			FROM (SELECT 'readmodel.` + table + `'::regclass AS r) x`
		want := fmt.Sprintf("%d %d", changes, changes)
		testkit.Eventually(t, testkit.Patience, func() error {
			if got := text(t, l, sql); got != want {
				return fmt.Errorf("readmodel.%s: updates and those in place: %s, want %s", table, got, want)
			}
			return nil
		})
	}
}
