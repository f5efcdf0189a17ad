package watch_test

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/watch"
)

// judge appends a verdict about a node, or about the control plane if the node is empty.
func (k *kit) judge(node string, reason commonv1.DriftReason) {
	k.t.Helper()
	k.Append(&recoveryv1.NodeVerdict{NodeId: node, Reason: reason, DetectedAt: timestamppb.New(k.Now())})
}

// Scenario: recovery judges a node. That is a change of the node, for people of the operator. Those of its tenant
// see no node.
func TestAVerdictIsAChangeOfItsNode(t *testing.T) {
	k := newKit(t, watch.Config{Interval: time.Millisecond}, true)
	topics := []readmodelv1.Topic{readmodelv1.Topic_TOPIC_NODES, readmodelv1.Topic_TOPIC_WORKSPACES}
	scope, err := list.ScopeOf(rpc.Person{Subject: "p", TenantID: k.A.ID, Roles: []string{"viewer"}})
	k.check(err)
	operator := k.watch(watch.Request{Filter: watch.Filter{Scope: list.All(), Topics: topics}}, nil)
	tenant := k.watch(watch.Request{Filter: watch.Filter{Scope: scope, Topics: topics}}, nil)
	operator.bootstrapped()
	tenant.bootstrapped()
	k.judge(k.A.NodeID, commonv1.DriftReason_DRIFT_REASON_TOKEN_REUSE)
	k.sync()
	changed := func(f *readmodelv1.WatchResponse) bool {
		return f.GetItem().GetChange() == readmodelv1.Change_CHANGE_UPDATED && f.GetItem().GetId() == k.A.NodeID
	}
	got := operator.until("verdict", changed).GetItem().GetNode()
	if got.GetVerdict().GetReason() != commonv1.DriftReason_DRIFT_REASON_TOKEN_REUSE {
		t.Errorf("people of the operator see %v", got)
	}
	moved := k.workspace(k.A, active)
	k.Put(moved) // a change that the tenant does see, behind that of the node
	k.sync()
	seen := tenant.until("its workspace", func(f *readmodelv1.WatchResponse) bool {
		if f.GetItem().GetNode() != nil {
			t.Errorf("a person of the tenant sees %v", f.GetItem())
		}
		return f.GetItem().GetWorkspace().GetState() == commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE
	})
	if seen.GetItem().GetWorkspace().GetNodeId() != "" {
		t.Errorf("a person of the tenant sees %v", seen.GetItem())
	}
}

// A workspace shows whether its agent can act, which no event of the workspace contains.
func TestAnAgentThatComesOrGoesIsAChangeOfItsWorkspace(t *testing.T) {
	k := newKit(t, watch.Config{Scan: 50 * time.Millisecond}, true)
	at := k.workspace(k.A, active)
	at.NodeId = k.A.NodeID
	k.Put(at)
	k.sync()
	filter := watch.Filter{Scope: list.All(), Topics: []readmodelv1.Topic{readmodelv1.Topic_TOPIC_WORKSPACES}}
	w := k.watch(watch.Request{Filter: filter}, nil)
	w.bootstrapped()
	agent := func(connected bool, reason string) func(*readmodelv1.WatchResponse) bool {
		return func(f *readmodelv1.WatchResponse) bool {
			ws := f.GetItem().GetWorkspace()
			return f.GetItem().GetChange() == readmodelv1.Change_CHANGE_UPDATED && ws.GetWorkspaceId() == k.A.WorkspaceID &&
				ws.GetAgentConnected() == connected && ws.GetReason() == reason
		}
	}
	session := func(state commonv1.SessionState) {
		k.Put(&nodev1.SessionChanged{
			SessionId: k.A.SessionID, NodeId: k.A.NodeID, ReplicaId: k.Replica, Generation: 1, State: state,
			LastSeenAt: timestamppb.New(k.Now()),
		})
		k.sync()
	}
	k.Beat(false)
	k.Put(&lifecyclev1.NodeGate{NodeId: k.A.NodeID})
	k.judge(k.A.NodeID, commonv1.DriftReason_DRIFT_REASON_NODE_NOT_ADMITTED)
	k.sync()
	w.until("shut gate", agent(true, "node_not_admitted"))
	k.Beat(false)
	k.judge(k.A.NodeID, commonv1.DriftReason_DRIFT_REASON_UNSPECIFIED)
	k.Put(&lifecyclev1.NodeGate{NodeId: k.A.NodeID, Admitted: true})
	k.sync()
	w.until("open gate", agent(true, ""))
	w.mu.Lock()
	token := w.token
	w.mu.Unlock()
	session(commonv1.SessionState_SESSION_STATE_CLOSED)
	w.until("end of the session", agent(false, "disconnected"))
	_ = w.stop()
	k.watch(watch.Request{Filter: filter, Resume: token}, nil).until("end of the session, resumed",
		agent(false, "disconnected"))

	session(commonv1.SessionState_SESSION_STATE_ADMITTED)
	later := k.watch(watch.Request{Filter: filter}, nil)
	later.bootstrapped()
	k.Beat(false)
	// so that the hub has scanned while all nodes were connected
	k.Put(&lifecyclev1.NodeGate{NodeId: k.A.NodeID, Admitted: true, Slots: 2})
	k.sync()
	later.until("gate", agent(true, ""))
	testkit.SetClockOffset(k.DB, 20*time.Second)
	later.until("silence of the replica", agent(false, "disconnected"))
	k.judge("", commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_OUTAGE)
	k.sync()
	later.until("outage", agent(false, "control_plane_outage"))
}
