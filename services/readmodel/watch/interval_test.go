package watch_test

import (
	"fmt"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/list"
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
	filter := watch.Filter{Scope: list.All(), Topics: []readmodelv1.Topic{
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
	k.Append(&lifecyclev1.NodeGate{NodeId: k.A.NodeID})
	k.judge(k.A.NodeID, commonv1.DriftReason_DRIFT_REASON_NODE_NOT_ADMITTED)
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

// Scenario: a node and its workspace are sent, or the workspace alone, and within their interval the node's replica
// falls silent, of which there is no event. Both are sent at once: a watcher that resumed later would not get what
// waits.
func TestWhatNoEventMadeDoesNotWaitForAnInterval(t *testing.T) {
	for _, both := range []bool{false, true} {
		t.Run(fmt.Sprintf("node_too_%v", both), func(t *testing.T) {
			k := newKit(t, watch.Config{Interval: time.Hour, Scan: 50 * time.Millisecond}, true)
			at := k.workspace(k.A, active)
			at.NodeId = k.A.NodeID
			k.Put(at)
			k.sync()
			w := k.watch(watch.Request{Filter: watch.Filter{Scope: list.All(), Topics: []readmodelv1.Topic{
				readmodelv1.Topic_TOPIC_NODES, readmodelv1.Topic_TOPIC_WORKSPACES,
			}}}, nil)
			w.bootstrapped()
			change := func(id, reason string) func(*readmodelv1.WatchResponse) bool {
				return func(f *readmodelv1.WatchResponse) bool {
					i := f.GetItem()
					return i.GetId() == id && i.GetChange() == readmodelv1.Change_CHANGE_UPDATED &&
						i.GetNode().GetReason()+i.GetWorkspace().GetReason() == reason
				}
			}
			k.Beat(false) // a replica is silent after 15 s
			if both {
				k.Put(&lifecyclev1.NodeGate{NodeId: k.A.NodeID, Admitted: true, Slots: 2})
			} else {
				k.Put(at)
			}
			k.sync()
			if both {
				w.until("node", change(k.A.NodeID, ""))
			}
			w.until("workspace", change(k.A.WorkspaceID, ""))
			testkit.SetClockOffset(k.DB, 20*time.Second)
			w.until("node of a silent replica", change(k.A.NodeID, "disconnected"))
			w.until("workspace on it", change(k.A.WorkspaceID, "disconnected"))
		})
	}
}
