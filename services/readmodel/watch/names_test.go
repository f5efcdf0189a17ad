package watch_test

import (
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/watch"
)

type shownNames struct{ workspace, node string }

// namesIn returns the names that an item has beside its ids.
func namesIn(i *readmodelv1.WatchItem) shownNames {
	switch o := i.GetObject().(type) {
	case *readmodelv1.WatchItem_Node:
		return shownNames{workspace: o.Node.GetWorkspace()}
	case *readmodelv1.WatchItem_Task:
		return shownNames{o.Task.GetWorkspace(), o.Task.GetNodeName()}
	case *readmodelv1.WatchItem_Instance:
		return shownNames{o.Instance.GetWorkspace(), o.Instance.GetNodeName()}
	}
	return shownNames{}
}

// TestChangesNameWhatTheirWatcherMayMeet: a change comes with the names of its watcher's scope, as a snapshot and a
// resume do, and with no other tenant's.
func TestChangesNameWhatTheirWatcherMayMeet(t *testing.T) {
	k := newKit(t, watch.Config{}, true)
	scope, err := list.ScopeOf(rpc.Person{Subject: "p", TenantID: k.A.ID, Roles: []string{"tenant"}})
	k.check(err)
	all := k.watch(watch.Request{Filter: watch.Filter{Scope: list.All(), Topics: allTopics}}, nil)
	own := k.watch(watch.Request{Filter: watch.Filter{Scope: scope, Topics: allTopics}}, nil)
	all.bootstrapped()
	token := own.bootstrapped().GetResumeToken()
	// Rows of one tenant that point at another's workspace and node, as no row should, and rows that do not.
	strayedInstance, strayedTask, instance, task := ids.New(), ids.New(), ids.New(), ids.New()
	for _, row := range []struct {
		instance, task, workspace, node string
	}{{strayedInstance, strayedTask, k.B.WorkspaceID, k.B.NodeID}, {instance, task, k.A.WorkspaceID, k.A.NodeID}} {
		k.Append(&lifecyclev1.Instance{
			InstanceId: row.instance, WorkspaceId: row.workspace, TenantId: k.A.ID,
			NodeId: row.node,
		})
		k.Append(&lifecyclev1.TaskChanged{Task: &lifecyclev1.Task{
			TaskId: row.task, NodeId: row.node, TenantId: k.A.ID, WorkspaceId: row.workspace,
			State: commonv1.TaskState_TASK_STATE_RUNNING,
		}})
	}
	k.Put(&lifecyclev1.NodeGate{NodeId: k.A.NodeID, Admitted: true, WorkspaceId: k.B.WorkspaceID})
	k.sync()
	foreign, mine := shownNames{"beta/" + k.B.WorkspaceName, k.B.NodeName},
		shownNames{"alpha/" + k.A.WorkspaceName, k.A.NodeName}
	see := func(w *watcher, who string, want map[string]shownNames) {
		t.Helper()
		for id, names := range want {
			f := w.until(id, func(f *readmodelv1.WatchResponse) bool {
				return f.GetItem().GetId() == id && f.GetItem().GetChange() != readmodelv1.Change_CHANGE_SNAPSHOT
			})
			if got := namesIn(f.GetItem()); got != names {
				t.Errorf("%s: %s is named %+v, want %+v", who, f.GetItem().GetTopic(), got, names)
			}
		}
	}
	see(all, "operator", map[string]shownNames{
		strayedInstance: foreign, strayedTask: foreign, instance: mine, task: mine,
		k.A.NodeID: {workspace: foreign.workspace},
	})
	mine.node = "" // tenants see no nodes
	hidden := map[string]shownNames{strayedInstance: {}, strayedTask: {}, instance: mine, task: mine}
	see(own, "tenant", hidden)
	resumed := k.watch(watch.Request{Filter: watch.Filter{Scope: scope, Topics: allTopics}, Resume: token}, nil)
	see(resumed, "tenant, resumed", hidden)
}
