package view_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/project"
	"github.com/gpuaas/mesh/services/readmodel/project/projecttest"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

type kit struct {
	*projecttest.World

	t         *testing.T
	reader    *view.Reader
	projector *project.Projector
}

func newKit(t *testing.T) *kit {
	t.Helper()
	testkit.IO(t)
	w := projecttest.NewWorld(t)
	k := &kit{
		World: w, t: t, projector: w.Projector(),
		reader: view.NewReader(w.DB.Pool(pg.RoleReadmodel)),
	}
	k.sync()
	return k
}

func (k *kit) sync() {
	k.t.Helper()
	k.Number()
	if err := k.projector.Drain(testkit.Context(k.t)); err != nil {
		k.t.Fatal(err)
	}
}

func (k *kit) read(scope list.Scope, fn func(ctx context.Context, s *view.Snapshot) error) error {
	k.t.Helper()
	return k.reader.Read(testkit.Context(k.t), scope, fn)
}

func (k *kit) node(ref string) (*readmodelv1.Node, error) {
	k.t.Helper()
	var n *readmodelv1.Node
	err := k.read(list.All(), func(ctx context.Context, s *view.Snapshot) error {
		var err error
		n, err = s.Node(ctx, ref)
		return err
	})
	return n, err
}

func (k *kit) workspace(scope list.Scope, ref string) (*readmodelv1.Workspace, error) {
	k.t.Helper()
	var w *readmodelv1.Workspace
	err := k.read(scope, func(ctx context.Context, s *view.Snapshot) error {
		var err error
		w, err = s.Workspace(ctx, ref)
		return err
	})
	return w, err
}

func scopeOf(t *testing.T, tenantID string) list.Scope {
	t.Helper()
	scope, err := list.ScopeOf(rpc.Person{
		Subject: "p", TenantID: tenantID,
		Roles: []string{"tenant", "operator", "viewer"},
	})
	if err != nil {
		t.Fatal(err)
	}
	return scope
}

// Scenario: the control plane is in rollback mode. A node that is connected has no reason and shows that as a fact; one
// that is not has it as its verdict.
func TestAConnectedNodeShowsWhyTheControlPlaneIsNotWell(t *testing.T) {
	k := newKit(t)
	const rollback = "control_plane_rollback"
	expect := func(what string, connected bool, reason, fact string) {
		t.Helper()
		k.sync()
		n, err := k.node(k.A.NodeName)
		if err != nil {
			t.Fatal(err)
		}
		if n.GetConnected() != connected || n.GetReason() != reason || n.GetControlPlaneReason() != fact {
			t.Errorf("%s: connected %t, reason %q, of the control plane %q", what, n.GetConnected(), n.GetReason(),
				n.GetControlPlaneReason())
		}
	}
	expect("as made", true, "", "")
	back := k.judge("", 1, commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_ROLLBACK, k.Now(), nil)
	expect("in rollback mode", true, "", rollback)
	k.Beat(true)
	expect("not connected", false, rollback, "")
	k.Beat(false)
	k.judge("", 2, 0, k.Now(), endOf(back, k.Now()))
	expect("accepted", true, "", "")
}

func TestConnectedFollowsSessionReplicaAndHandOver(t *testing.T) {
	k := newKit(t)
	replica := k.Replica
	expect := func(what string, connected bool, reason, session string) {
		t.Helper()
		if connected { // a replica is silent after 15 s
			k.BeatOf(replica, k.Now().Add(-time.Hour), false)
		}
		k.sync()
		n, err := k.node(k.A.NodeName)
		if err != nil {
			t.Fatal(err)
		}
		if n.GetConnected() != connected || n.GetReason() != reason || n.GetSession().GetSessionId() != session {
			t.Errorf("%s: connected %v reason %q session %s", what, n.GetConnected(), n.GetReason(),
				n.GetSession().GetSessionId())
		}
	}
	session := func(id, replica string, generation int64, state commonv1.SessionState) *nodev1.SessionChanged {
		return &nodev1.SessionChanged{
			SessionId: id, NodeId: k.A.NodeID, ReplicaId: replica, Generation: generation, State: state,
			LastSeenAt: timestamppb.New(k.Now()),
		}
	}
	opening, admitted := commonv1.SessionState_SESSION_STATE_OPENING, commonv1.SessionState_SESSION_STATE_ADMITTED
	draining, closed := commonv1.SessionState_SESSION_STATE_DRAINING, commonv1.SessionState_SESSION_STATE_CLOSED
	expect("as made", true, "", k.A.SessionID)

	next := ids.New()
	k.Append(session(next, k.Replica, 2, opening))
	expect("the next opens", true, "", k.A.SessionID)
	k.Append(session(next, k.Replica, 2, admitted))
	k.Append(session(k.A.SessionID, k.Replica, 1, draining))
	expect("the next is admitted", true, "", next)
	k.Append(session(k.A.SessionID, k.Replica, 1, closed))
	expect("the old one closed", true, "", next)

	late := session(next, k.Replica, 2, admitted)
	late.Late = true
	k.Append(late)
	expect("late", false, "disconnected", next)
	k.Append(session(next, k.Replica, 2, admitted))
	expect("on time again", true, "", next)

	k.Beat(true)
	expect("its replica leaves", false, "disconnected", next)
	out := k.judge("", 1, commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_OUTAGE, k.Now(), nil)
	expect("recovery sees that none listens", false, "control_plane_outage", next)
	k.Beat(false)
	expect("its replica is back", true, "", next)

	testkit.SetClockOffset(k.DB, 20*time.Second)
	expect("no beat for 20 s", false, "control_plane_outage", next)
	k.judge("", 2, 0, k.Now(), endOf(out, k.Now()))
	other := ids.New()
	k.BeatOf(other, k.Now(), false)
	expect("another replica listens", false, "disconnected", next)
	third := ids.New()
	replica = other
	k.Append(session(third, other, 3, admitted))
	expect("connected there", true, "", third)
	k.Append(session(third, other, 3, closed))
	testkit.SetClockOffset(k.DB, 3*time.Minute)
	k.BeatOf(other, k.Now().Add(-160*time.Second), false)
	expect("silent for long, and not judged", false, "disconnected", third)
	down := k.judge(k.A.NodeID, 1, agentDown, k.Now(), nil)
	expect("judged", false, "agent_down", third)
	// A gate that is not open yet.
	k.Append(session(ids.New(), other, 2, admitted))
	fourth := ids.New()
	k.Append(session(fourth, other, 4, admitted))
	expect("connected, and judged down before", true, "", fourth)
	shut := k.judge(k.A.NodeID, 2, commonv1.DriftReason_DRIFT_REASON_NODE_NOT_ADMITTED, k.Now(), endOf(down, k.Now()))
	expect("gate shut", true, "node_not_admitted", fourth)
	k.judge(k.A.NodeID, 3, 0, k.Now(), endOf(shut, k.Now()))
	expect("nothing is wrong", true, "", fourth)
}

func TestNamesAreResolved(t *testing.T) {
	k := newKit(t)
	twin := ids.New()
	gone := ids.New()
	k.Append(&recoveryv1.NodeIdentity{
		NodeId: gone, Name: k.A.NodeName,
		State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED,
	})
	k.Append(&lifecyclev1.Workspace{
		WorkspaceId: twin, TenantId: k.B.ID, Tenant: "beta", Name: k.A.WorkspaceName,
		State: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
	})
	old := ids.New()
	k.Append(&lifecyclev1.Workspace{
		WorkspaceId: old, TenantId: k.A.ID, Tenant: "alpha", Name: k.A.WorkspaceName,
		State: commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED,
	})
	k.sync()
	if n, err := k.node(k.A.NodeName); err != nil || n.GetNodeId() != k.A.NodeID {
		t.Errorf("a retired namesake stands in the way: %v, %v", n, err)
	}
	if n, err := k.node(strings.ToUpper(gone)); err != nil || n.GetNodeId() != gone {
		t.Errorf("by id: %v, %v", n, err)
	}
	var retired [2]string // a name of which only retired nodes are left
	for i := range retired {
		retired[i] = ids.New()
		k.Append(&recoveryv1.NodeIdentity{
			NodeId: retired[i], Name: k.A.NodeName + "-gone",
			State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED,
		})
	}
	k.sync()
	if n, err := k.node(k.A.NodeName + "-gone"); err != nil || n.GetNodeId() != max(retired[0], retired[1]) {
		t.Errorf("a name of retired nodes: %v, %v, want the newer of %v", n, err, retired)
	}
	k.Append(&recoveryv1.NodeIdentity{
		NodeId: ids.New(), Name: k.A.NodeName,
		State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_PENDING,
	})
	k.sync()
	if _, err := k.node(k.A.NodeName); !fault.Has(err, commonv1.Reason_REASON_AMBIGUOUS) ||
		!slices.Contains(unmet(err), "node "+k.A.NodeID+" "+k.A.NodeName) {
		t.Errorf("an ambiguous node: %v", err)
	}
	all := list.All()
	if w, err := k.workspace(all, "alpha/"+k.A.WorkspaceName); err != nil || w.GetWorkspaceId() != k.A.WorkspaceID {
		t.Errorf("tenant/name: %v, %v", w, err)
	}
	_, err := k.workspace(all, k.A.WorkspaceName)
	want := []string{
		"workspace " + k.A.WorkspaceID + " alpha/" + k.A.WorkspaceName,
		"workspace " + twin + " beta/" + k.A.WorkspaceName,
	}
	if !fault.Has(err, commonv1.Reason_REASON_AMBIGUOUS) || !slices.Equal(unmet(err), want) {
		t.Errorf("an ambiguous name: %v", err)
	}
	// For a tenant's person the other tenant's namesake does not exist.
	if w, err := k.workspace(scopeOf(t, k.A.ID), k.A.WorkspaceName); err != nil || w.GetWorkspaceId() != k.A.WorkspaceID {
		t.Errorf("scoped: %v, %v", w, err)
	}
	for _, ref := range []string{
		k.B.WorkspaceID, "beta/" + k.B.WorkspaceName, k.B.WorkspaceName, ids.New(), "nobody", "/",
		"a/",
	} {
		if _, err := k.workspace(scopeOf(t, k.A.ID), ref); !fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
			t.Errorf("%s: %v", ref, err)
		}
	}
	w, err := k.workspace(all, k.A.WorkspaceID)
	if err != nil || !w.GetStalled() || w.GetCurrentStep() != "Allocate storage" || w.GetWhyWaiting() == "" ||
		w.GetUserState() != commonv1.UserState_USER_STATE_TEMPORARY {
		t.Errorf("workspace %v, %v", w, err)
	}
}

func unmet(err error) []string {
	f, ok := fault.As(err)
	if !ok {
		return nil
	}
	return f.Unmet
}

func TestPagesMeetEachItemOnce(t *testing.T) {
	k := newKit(t)
	want := []string{}
	for n := range 7 {
		id := ids.New()
		k.Append(&lifecyclev1.Instance{InstanceId: id, WorkspaceId: k.A.WorkspaceID, TenantId: k.A.ID})
		k.Append(&recoveryv1.NodeIdentity{
			NodeId: ids.New(), Name: fmt.Sprintf("m%d", n%3),
			State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_PENDING,
		})
		want = append(want, id)
	}
	k.sync()
	slices.Reverse(want)
	want = append(want, k.B.InstanceID, k.A.InstanceID)
	pages := func(read func(ctx context.Context, s *view.Snapshot, p list.Page) ([]string, string, error)) []string {
		t.Helper()
		var got []string
		page := list.Page{Size: 2}
		for range 20 {
			err := k.read(list.All(), func(ctx context.Context, s *view.Snapshot) error {
				found, next, err := read(ctx, s, page)
				got = append(got, found...)
				page.Token = next
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			if page.Token == "" {
				return got
			}
		}
		t.Fatal("no last page")
		return nil
	}
	got := pages(func(ctx context.Context, s *view.Snapshot, p list.Page) ([]string, string, error) {
		found, next, err := s.Instances(ctx, view.PerWorkspaceFilter{}, p)
		out := []string{}
		for _, i := range found {
			out = append(out, i.GetInstanceId())
		}
		return out, next, err
	})
	if !slices.Equal(got, want) {
		t.Errorf("instances %v, want %v", got, want)
	}
	nodes := pages(func(ctx context.Context, s *view.Snapshot, p list.Page) ([]string, string, error) {
		found, next, err := s.Nodes(ctx, view.NodeFilter{}, p)
		out := []string{}
		for _, n := range found {
			out = append(out, n.GetName()+" "+n.GetNodeId())
		}
		return out, next, err
	})
	if len(nodes) != 10 || !slices.IsSorted(nodes) || len(slices.Compact(slices.Clone(nodes))) != 10 {
		t.Errorf("nodes %v", nodes)
	}
	for _, token := range []string{"x", "e30", "eyJsIjoibm9kZXMiLCJpIjoieCJ9"} {
		err := k.read(list.All(), func(ctx context.Context, s *view.Snapshot) error {
			_, _, err := s.Nodes(ctx, view.NodeFilter{}, list.Page{Token: token})
			return err
		})
		if !fault.Has(err, commonv1.Reason_REASON_INVALID_ARGUMENT) {
			t.Errorf("token %q: %v", token, err)
		}
	}
}

func TestTasksCarryTheirHistoryInOrder(t *testing.T) {
	k := newKit(t)
	task := func(v int64, states ...commonv1.TaskState) {
		c := &lifecyclev1.TaskChanged{Task: &lifecyclev1.Task{
			TaskId: k.A.TaskID, NodeId: k.A.NodeID, TenantId: k.A.ID,
			State: states[len(states)-1], Attempt: 1,
		}}
		for _, s := range states {
			c.Transitions = append(c.Transitions, &lifecyclev1.TaskTransition{State: s, Attempt: 1})
		}
		k.AppendVersion(c, v)
	}
	task(3, commonv1.TaskState_TASK_STATE_RUNNING, commonv1.TaskState_TASK_STATE_SUCCEEDED)
	task(2, commonv1.TaskState_TASK_STATE_DISPATCHED, commonv1.TaskState_TASK_STATE_DELIVERED) // came late
	k.sync()
	err := k.read(scopeOf(t, k.A.ID), func(ctx context.Context, s *view.Snapshot) error {
		got, err := s.Task(ctx, k.A.TaskID)
		if err != nil {
			return err
		}
		if got.GetState() != commonv1.TaskState_TASK_STATE_SUCCEEDED || got.GetCurrent() || len(got.GetTransitions()) != 5 ||
			got.GetNodeName() != "" || got.GetNodeId() != "" {
			t.Errorf("task %v", got)
		}
		for n, x := range got.GetTransitions() {
			if int(x.GetState()) != n+1 {
				t.Errorf("transition %d is %s", n, x.GetState())
			}
		}
		if _, err := s.Task(ctx, k.B.TaskID); !fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
			t.Errorf("another tenant's task: %v", err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestScopeIsClosedByDefault(t *testing.T) {
	if _, err := list.ScopeOf(rpc.Person{Subject: "p", Roles: []string{"tenant"}}); !fault.Has(err,
		commonv1.Reason_REASON_PERMISSION_DENIED) {
		t.Errorf("a tenant's person without a tenant: %v", err)
	}
	var none list.Scope
	if none.Meets("") || none.Meets(ids.New()) || none.Everything() {
		t.Error("the zero scope meets something")
	}
	if s := scopeOf(t, "t"); s.Meets("") || !s.Meets("t") {
		t.Error("a tenant's scope")
	}
	if s, err := list.ScopeOf(rpc.Person{Roles: []string{"viewer"}}); err != nil || !s.Meets("") || !s.Everything() {
		t.Error("an operator's scope")
	}
}

// A workspace that stalls on its way up is temporary until it is up: another attempt, a step that succeeds later and
// another operation do not end that.
func TestAStallIsTemporaryUntilTheWorkspaceIsUp(t *testing.T) {
	k := newKit(t)
	ws := &lifecyclev1.Workspace{
		WorkspaceId: ids.New(), TenantId: k.A.ID, Tenant: k.A.Name, Name: "slow",
		State: commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING, Epoch: 1,
	}
	run := &lifecyclev1.Run{
		WorkspaceId: ws.GetWorkspaceId(), TenantId: k.A.ID,
		StepNames: []string{"Allocate storage", "Mark active"},
	}
	const (
		running   = commonv1.AttemptState_ATTEMPT_STATE_RUNNING
		failed    = commonv1.AttemptState_ATTEMPT_STATE_FAILED
		succeeded = commonv1.AttemptState_ATTEMPT_STATE_SUCCEEDED
		normal    = commonv1.UserState_USER_STATE_NORMAL
		temporary = commonv1.UserState_USER_STATE_TEMPORARY
	)
	begin := func(kind commonv1.OperationKind) {
		run.RunId, run.Kind, run.State, run.Phase, run.Step, run.StuckReason = ids.New(), kind,
			commonv1.RunState_RUN_STATE_RUNNING, "do", 0, ""
		run.WhyWaiting, ws.RunId, ws.State = "doing it", run.GetRunId(), commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING
		k.Append(run)
		k.Append(ws)
	}
	attempt := func(step, n int32, state commonv1.AttemptState, stalled bool) {
		k.Append(&lifecyclev1.StepAttempt{
			RunId: run.GetRunId(), WorkspaceId: ws.GetWorkspaceId(), Step: step, Name: run.GetStepNames()[step], Attempt: n,
			Direction: commonv1.Direction_DIRECTION_DO, State: state, Stalled: stalled,
		})
	}
	is := func(when string, want commonv1.UserState, stalled bool) {
		t.Helper()
		k.sync()
		if w, err := k.workspace(list.All(), ws.GetWorkspaceId()); err != nil || w.GetUserState() != want ||
			w.GetStalled() != stalled {
			t.Errorf("%s: %v, stalled %v, %v", when, w.GetUserState(), w.GetStalled(), err)
		}
	}
	begin(commonv1.OperationKind_OPERATION_KIND_CREATE)
	attempt(0, 1, running, false)
	is("it begins", normal, false)
	run.StuckReason = `step_stalled: no progress at "Allocate storage" for 00:05:00`
	k.Append(run)
	attempt(0, 1, running, true)
	is("it stalls", temporary, true)
	attempt(0, 1, failed, true)
	is("the attempt failed", temporary, true)
	attempt(0, 2, running, false)
	is("the second attempt runs", temporary, true)
	run.StuckReason = ""
	k.Append(run)
	is("the flag is taken back", temporary, false)
	attempt(0, 2, succeeded, false)
	run.Step = 1
	k.Append(run)
	attempt(1, 1, running, false)
	is("the step has succeeded, and the workspace has never been up", temporary, false)
	run.State, ws.State, ws.LastErrorCode = commonv1.RunState_RUN_STATE_FAILED,
		commonv1.WorkspaceState_WORKSPACE_STATE_FAILED, "launch_failed"
	k.Append(run)
	k.Append(ws)
	is("it failed", commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED, false)
	begin(commonv1.OperationKind_OPERATION_KIND_RETRY)
	attempt(0, 1, running, false)
	is("it is tried again", temporary, false)
	run.State, ws.State, ws.LastErrorCode = commonv1.RunState_RUN_STATE_SUCCEEDED,
		commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, ""
	k.Append(run)
	k.Append(ws)
	is("it is up", normal, false)
	// A step that stalled before the workspace was up does not count.
	run.State, ws.State, ws.LastErrorCode = commonv1.RunState_RUN_STATE_FAILED,
		commonv1.WorkspaceState_WORKSPACE_STATE_FAILED, "x"
	run.RunId = ids.New()
	k.Append(run)
	begin(commonv1.OperationKind_OPERATION_KIND_RETRY)
	is("it is provisioned anew", normal, false)
}
