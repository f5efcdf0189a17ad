package view_test

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/status"
)

// TestAnActiveWorkspaceShowsItsWorkloads follows a workspace whose workload crashes after it was active: the report of
// its own node's agent for its present epoch is shown as long as that agent is connected, until the agent's next
// report.
func TestAnActiveWorkspaceShowsItsWorkloads(t *testing.T) {
	k := newKit(t)
	scope := list.All()
	const (
		normal    = commonv1.UserState_USER_STATE_NORMAL
		temporary = commonv1.UserState_USER_STATE_TEMPORARY
		active    = commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE
	)
	workspace := func(state commonv1.WorkspaceState, epoch int64) {
		k.Append(&lifecyclev1.Workspace{
			WorkspaceId: k.A.WorkspaceID, TenantId: k.A.ID, Tenant: k.A.Name, Name: k.A.WorkspaceName, State: state,
			Epoch: epoch, NodeId: k.A.NodeID, NodeName: k.A.NodeName,
			Spec: &lifecyclev1.WorkspaceSpec{Workloads: []*nodev1.Workload{{Name: "main"}, {Name: "side"}}},
		})
	}
	at := timestamppb.New(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))
	loop := &nodev1.WorkloadStatus{
		Name: "main", Phase: nodev1.WorkloadPhase_WORKLOAD_PHASE_BACKOFF, Restarts: 4, ExitCode: 3,
		Detail: "exited with status 3", CrashLoop: true, ExitedAt: at,
	}
	runs := &nodev1.WorkloadStatus{
		Name: "main", Phase: nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING, Ready: true,
		Restarts: 4, ExitCode: 3, ExitedAt: at,
	}
	exited := func(name string, code int32) *nodev1.WorkloadStatus {
		return &nodev1.WorkloadStatus{
			Name: name, Phase: nodev1.WorkloadPhase_WORKLOAD_PHASE_EXITED, ExitCode: code,
			ExitedAt: at,
		}
	}
	observe := func(nodeID string, epoch int64, workloads ...*nodev1.WorkloadStatus) {
		k.Observe(nodeID, &nodev1.Observation{WorkspaceId: k.A.WorkspaceID, Epoch: epoch, Workloads: workloads})
	}
	expect := func(what, reason string, user commonv1.UserState, words ...string) {
		t.Helper()
		k.sync()
		w, err := k.workspace(scope, k.A.WorkspaceName)
		if err != nil {
			t.Fatal(err)
		}
		if w.GetWorkloadReason() != reason || w.GetUserState() != user {
			t.Errorf("%s: %q, %s; want %q, %s", what, w.GetWorkloadReason(), names.Of(w.GetUserState()), reason, names.Of(user))
		}
		if (reason == "") != (w.GetWorkloadDetail() == "") || (reason == "") != (w.GetNextAction() == "") {
			t.Errorf("%s: %q in words %q, and then %q", what, reason, w.GetWorkloadDetail(), w.GetNextAction())
		}
		for _, word := range words {
			if !strings.Contains(w.GetWorkloadDetail()+"\n"+w.GetNextAction(), word) {
				t.Errorf("%s: %q and %q do not have %q", what, w.GetWorkloadDetail(), w.GetNextAction(), word)
			}
		}
	}
	logs := "`gpuaas workspaces logs " + k.A.Name + "/" + k.A.WorkspaceName + " --workload main"
	workspace(active, 1)
	observe(k.A.NodeID, 1, runs)
	expect("it runs", "", normal)
	observe(k.A.NodeID, 1, loop)
	expect("it loops", status.ReasonCrashLoop, temporary,
		"crash loop: main, 4 restarts, exited with status 3 at 2026-01-02T03:04:05Z", logs+" --previous`")
	observe(k.B.NodeID, 1, runs)
	expect("another node says otherwise", status.ReasonCrashLoop, temporary)
	workspace(commonv1.WorkspaceState_WORKSPACE_STATE_RECREATING, 1)
	expect("it is recreated", "", commonv1.UserState_USER_STATE_RECOVERING)
	workspace(active, 2)
	expect("another epoch", "", normal)
	observe(k.A.NodeID, 2, loop)
	expect("it loops again", status.ReasonCrashLoop, temporary)
	session := &nodev1.SessionChanged{
		SessionId: k.A.SessionID, NodeId: k.A.NodeID, ReplicaId: k.Replica, Generation: 1,
		State: commonv1.SessionState_SESSION_STATE_CLOSED, LastSeenAt: timestamppb.New(k.Now()),
		ClosedAt: timestamppb.New(k.Now()),
	}
	k.Append(session)
	expect("its agent cannot be heard", "", normal)
	session.State, session.ClosedAt = commonv1.SessionState_SESSION_STATE_ADMITTED, nil
	k.Append(session)
	expect("its agent is heard again", status.ReasonCrashLoop, temporary)
	observe(k.A.NodeID, 2, runs)
	expect("it runs again", "", normal)
	observe(k.A.NodeID, 2, exited("main", 2), runs)
	expect("it has ended", status.ReasonWorkloadStopped, temporary, "ended: main, exited with status 2 at ", logs+"`")
	observe(k.A.NodeID, 2, exited("main", 0))
	expect("it has finished", status.ReasonWorkloadStopped, normal, "finished: main at 2026-01-02T03:04:05Z", logs+"`")
	observe(k.A.NodeID, 2, exited("main", 0), exited("side", 2))
	expect("one has finished, and a later one has failed", status.ReasonWorkloadStopped, temporary,
		"ended: side, exited with status 2 at ", "finished: main", "--workload side`")
	observe(k.A.NodeID, 2, exited("main", 0), &nodev1.WorkloadStatus{
		Name: "side", Phase: nodev1.WorkloadPhase_WORKLOAD_PHASE_BACKOFF, ExitCode: 127, Detail: "no\x1b[31m room",
		CrashLoop: true,
	})
	expect("one has finished, and one cannot be started", status.ReasonCrashLoop, temporary,
		"cannot be started: side, no room; finished: main", "--workload side --previous")
	observe(k.A.NodeID, 2, exited("no-such-workload", 1))
	expect("a workload that the spec does not name", "", normal)
	// The agent is connected and the report is stale: the present state is not known, and the agent detail reports that.
	k.Observe(k.A.NodeID, &nodev1.Observation{
		WorkspaceId: k.A.WorkspaceID, Epoch: 2,
		Workloads: []*nodev1.WorkloadStatus{loop}, StaleSince: at,
	})
	expect("it is stale", "", normal)
	if w, err := k.workspace(scope, k.A.WorkspaceName); err != nil ||
		!strings.Contains(w.GetAgentDetail(), "since 2026-01-02T03:04:05Z") {
		t.Errorf("stale: %q, %v", w.GetAgentDetail(), err)
	}
	observe(k.A.NodeID, 2)
	expect("nothing is reported", "", normal)

	// Reports of other nodes are deleted, and never the earlier report of its own node.
	for range 12 {
		observe(ids.New(), 1, loop)
	}
	k.sync()
	var kept int
	err := k.DB.Pool(pg.RoleReadmodel).QueryRow(t.Context(),
		`SELECT count(*) FROM readmodel.observed WHERE workspace_id = $1`, k.A.WorkspaceID).Scan(&kept)
	if err != nil || kept != 9 {
		t.Errorf("%d observations are kept, %v; want eight and that of its own node", kept, err)
	}
	err = k.DB.Pool(pg.RoleReadmodel).QueryRow(t.Context(),
		`SELECT count(*) FROM readmodel.observed WHERE workspace_id = $1 AND node_id = $2`, k.A.WorkspaceID,
		k.A.NodeID).Scan(&kept)
	if err != nil || kept != 1 {
		t.Errorf("%d observations of its own node are kept, %v", kept, err)
	}
}
