package watch_test

import (
	"testing"
	"time"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/view"
	"github.com/gpuaas/mesh/services/readmodel/watch"
)

// Scenario: a workspace is sent, and then the gate of its node changes. The node is sent at once. The workspace, which
// shows the gate, waits for its own interval, and a watcher that resumes meanwhile gets it.
func TestAChangeOfANodeKeepsToTheIntervalOfItsWorkspace(t *testing.T) {
	k := newKit(t, watch.Config{Interval: time.Hour, Scan: time.Hour}, true)
	at := k.workspace(k.A, active)
	at.NodeId = k.A.NodeID
	k.Put(at)
	k.sync()
	filter := watch.Filter{Scope: view.All(), Topics: []readmodelv1.Topic{
		readmodelv1.Topic_TOPIC_NODES, readmodelv1.Topic_TOPIC_WORKSPACES,
	}}
	w := k.watch(watch.Request{Filter: filter}, nil)
	w.bootstrapped()
	change := func(id string) func(*readmodelv1.WatchResponse) bool {
		return func(f *readmodelv1.WatchResponse) bool {
			return f.GetItem().GetId() == id && f.GetItem().GetChange() == readmodelv1.Change_CHANGE_UPDATED
		}
	}
	k.Put(at)
	k.sync()
	w.until("workspace", change(k.A.WorkspaceID))
	k.Put(&lifecyclev1.NodeGate{NodeId: k.A.NodeID})
	k.sync()
	w.until("node", change(k.A.NodeID))
	k.Put(k.workspace(k.B, active))
	k.sync()
	w.until("workspace of another node", change(k.B.WorkspaceID))
	sent := 0
	for _, f := range w.all() {
		if change(k.A.WorkspaceID)(f) {
			sent++
		}
	}
	if sent != 1 {
		t.Errorf("the workspace was sent %d times within one interval", sent)
	}
	_ = w.stop()
	k.Beat(false) // a replica is silent after 15 s
	r := k.watch(watch.Request{Filter: filter, Resume: w.token}, nil)
	shut := r.until("workspace, resumed", change(k.A.WorkspaceID)).GetItem().GetWorkspace()
	if shut.GetReason() != "node_not_admitted" {
		t.Errorf("a resume shows the workspace with the reason %q", shut.GetReason())
	}
}

// Scenario: a node and its workspace are sent, and within their interval the node's replica falls silent, of which
// there is no event. Both are sent at once: a watcher that resumed later would not get what waits.
func TestWhatNoEventMadeDoesNotWaitForAnInterval(t *testing.T) {
	k := newKit(t, watch.Config{Interval: time.Hour, Scan: 50 * time.Millisecond}, true)
	at := k.workspace(k.A, active)
	at.NodeId = k.A.NodeID
	k.Put(at)
	k.sync()
	w := k.watch(watch.Request{Filter: watch.Filter{Scope: view.All(), Topics: []readmodelv1.Topic{
		readmodelv1.Topic_TOPIC_NODES, readmodelv1.Topic_TOPIC_WORKSPACES,
	}}}, nil)
	w.bootstrapped()
	change := func(id string, ok func(*readmodelv1.WatchItem) bool) func(*readmodelv1.WatchResponse) bool {
		return func(f *readmodelv1.WatchResponse) bool {
			i := f.GetItem()
			return i.GetId() == id && i.GetChange() == readmodelv1.Change_CHANGE_UPDATED && ok(i)
		}
	}
	open := func(i *readmodelv1.WatchItem) bool {
		return i.GetNode().GetConnected() || i.GetWorkspace().GetAgentConnected()
	}
	silent := func(i *readmodelv1.WatchItem) bool {
		return i.GetNode().GetReason() == "control_plane_outage" || i.GetWorkspace().GetReason() == "control_plane_outage"
	}
	k.Beat(false) // a replica is silent after 15 s
	k.Put(&lifecyclev1.NodeGate{NodeId: k.A.NodeID, Admitted: true, Slots: 2})
	k.sync()
	w.until("node", change(k.A.NodeID, open))
	w.until("workspace", change(k.A.WorkspaceID, open))
	testkit.SetClockOffset(k.DB, 20*time.Second)
	w.until("node of a silent replica", change(k.A.NodeID, silent))
	w.until("workspace on it", change(k.A.WorkspaceID, silent))
}
