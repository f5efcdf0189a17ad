package view_test

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/list"
)

func TestAnActiveWorkspaceShowsAnAgentThatCannotAct(t *testing.T) {
	k := newKit(t)
	scope := list.All()
	workspace := func(state commonv1.WorkspaceState, failures int32) {
		k.Append(&lifecyclev1.Workspace{
			WorkspaceId: k.A.WorkspaceID, TenantId: k.A.ID, Tenant: k.A.Name, Name: k.A.WorkspaceName, State: state, Epoch: 1,
			NodeId: k.A.NodeID, NodeName: k.A.NodeName, RegisterFailures: failures,
		})
	}
	expect := func(what string, connected bool, reason string, user commonv1.UserState, words ...string) {
		t.Helper()
		k.sync()
		w, err := k.workspace(scope, k.A.WorkspaceName)
		if err != nil {
			t.Fatal(err)
		}
		if w.GetAgentConnected() != connected || w.GetReason() != reason || w.GetUserState() != user {
			t.Errorf("%s: connected %t, reason %q, %s; want %t, %q, %s", what, w.GetAgentConnected(), w.GetReason(),
				names.Of(w.GetUserState()), connected, reason, names.Of(user))
		}
		if (reason == "") != (w.GetAgentDetail() == "") {
			t.Errorf("%s: reason %q in words %q", what, reason, w.GetAgentDetail())
		}
		if reason != "" && !strings.Contains(w.GetAgentDetail(), "the workload may well run") {
			t.Errorf("%s: silence is taken for a dead workload: %q", what, w.GetAgentDetail())
		}
		for _, word := range words {
			if !strings.Contains(w.GetAgentDetail(), word) {
				t.Errorf("%s: %q does not tell %q", what, w.GetAgentDetail(), word)
			}
		}
		if w.GetAgentSince() == nil {
			t.Errorf("%s: not known since when", what)
		}
	}
	const (
		normal    = commonv1.UserState_USER_STATE_NORMAL
		temporary = commonv1.UserState_USER_STATE_TEMPORARY
		active    = commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE
	)
	session := func(state commonv1.SessionState, ended time.Time) {
		s := &nodev1.SessionChanged{
			SessionId: k.A.SessionID, NodeId: k.A.NodeID, ReplicaId: k.Replica, Generation: 1, State: state,
			LastSeenAt: timestamppb.New(k.Now()),
		}
		if !ended.IsZero() {
			s.ClosedAt = timestamppb.New(ended)
		}
		k.Append(s)
	}
	identity := func(state commonv1.NodeIdentityState, at time.Time) {
		k.Append(&recoveryv1.NodeIdentity{
			NodeId: k.A.NodeID, Name: k.A.NodeName, TenantId: k.A.ID, WorkspaceId: k.A.WorkspaceID, State: state,
			StateAt: timestamppb.New(at),
		})
	}
	const admitted, closed = commonv1.SessionState_SESSION_STATE_ADMITTED, commonv1.SessionState_SESSION_STATE_CLOSED

	workspace(active, 0)
	expect("as made", true, "", normal)
	ended := k.Now().Add(-3 * time.Second).Truncate(time.Second)
	session(closed, ended)
	expect("its session ended", false, "disconnected", normal,
		"cannot be reached since "+ended.UTC().Format(time.RFC3339))
	workspace(commonv1.WorkspaceState_WORKSPACE_STATE_RECREATING, 0)
	expect("while it is recreated", false, "", commonv1.UserState_USER_STATE_RECOVERING)
	workspace(active, 0)
	version := int64(0)
	judge := func(node string, reason commonv1.DriftReason) {
		version++
		k.judge(node, version, reason, k.Now(), nil)
	}
	judge(k.A.NodeID, agentDown)
	expect("away for long", false, "agent_down", normal, "cannot be reached since")
	judge(k.A.NodeID, commonv1.DriftReason_DRIFT_REASON_CERT_EXPIRED)
	expect("away for a known reason, which is the operator's", false, "disconnected", normal, "cannot be reached since")
	k.Beat(false)
	session(admitted, time.Time{})
	expect("back", true, "", normal)

	const revoked = commonv1.DriftReason_DRIFT_REASON_IDENTITY_REVOKED_OR_FENCED
	for state, reason := range map[commonv1.NodeIdentityState]commonv1.DriftReason{
		commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD:        commonv1.DriftReason_DRIFT_REASON_IDENTITY_HELD,
		commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED: revoked,
		commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED:      revoked,
	} {
		at := k.Now().Truncate(time.Second)
		identity(state, at)
		judge(k.A.NodeID, reason)
		user := normal // a hold is a suspicion that can be taken back
		if reason == revoked {
			user = commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED
		}
		expect(names.Of(state)+", its session not closed yet", true, names.Of(reason), user,
			"its identity is "+names.Of(state)+" since "+at.UTC().Format(time.RFC3339))
	}
	identity(commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE, k.Now())
	k.Append(&lifecyclev1.NodeGate{NodeId: k.A.NodeID})
	judge(k.A.NodeID, commonv1.DriftReason_DRIFT_REASON_NODE_NOT_ADMITTED)
	expect("its gate is shut", true, "node_not_admitted", normal, "until lifecycle opens its gate")
	k.Append(&lifecyclev1.NodeGate{NodeId: k.A.NodeID, Admitted: true})
	judge(k.A.NodeID, 0)
	k.Beat(false) // a replica is silent after 15 s
	expect("its gate is open", true, "", normal)

	workspace(active, 2)
	expect("refused as it registers", true, "register_failing", temporary, "(2 so far)")
	workspace(active, 0)
	testkit.SetClockOffset(k.DB, 20*time.Second)
	// It is an outage of the control plane: an active workspace is normal, and the detail gives what is not known.
	judge("", commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_OUTAGE)
	expect("no replica listens", false, "control_plane_outage", normal, "no replica of nodeapi listens")

	// The node of the workspace is unknown to the projection.
	testkit.SetClockOffset(k.DB, 0)
	judge("", 0)
	k.Beat(false)
	k.Append(&lifecyclev1.Workspace{
		WorkspaceId: k.A.WorkspaceID, TenantId: k.A.ID, Tenant: k.A.Name, Name: k.A.WorkspaceName, State: active,
		NodeId: "0197a000-0000-7000-8000-000000000001",
	})
	k.sync()
	w, err := k.workspace(list.All(), k.A.WorkspaceID)
	if err != nil || w.GetReason() != "disconnected" || w.GetUserState() != normal || w.GetAgentSince() != nil {
		t.Errorf("an unknown node: %v, %v", w, err)
	}
}
