package watch

import (
	"context"
	"maps"
	"slices"

	"github.com/google/uuid"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/project"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// chunk is how many objects are read at once.
const chunk = 500

// load returns the changed objects as they are now.
func load(ctx context.Context, s *view.Snapshot, marks map[key]mark) ([]item, error) {
	byTopic := map[readmodelv1.Topic][]string{}
	for k := range marks {
		id := k.id
		if k.topic == readmodelv1.Topic_TOPIC_STEPS {
			id = stepRun(id)
		}
		if _, err := uuid.Parse(id); err == nil { // an object with another form of id was not projected
			byTopic[k.topic] = append(byTopic[k.topic], id)
		}
	}
	var items []item
	for topic, ids := range byTopic {
		slices.Sort(ids)
		for part := range slices.Chunk(slices.Compact(ids), chunk) {
			found, _, err := loadTopic(ctx, s, topic, part)
			if err != nil {
				return nil, err
			}
			for _, i := range found {
				m, wanted := marks[i.key]
				if !wanted {
					continue
				}
				i.created = m.created
				items = append(items, i)
			}
		}
	}
	return items, withOwners(ctx, s, items)
}

// workspacesOf returns the workspaces of the changed nodes that are not among the marks themselves. Each shows whether
// its node's agent can act.
func workspacesOf(ctx context.Context, s *view.Snapshot, marks map[key]mark) (map[key]mark, error) {
	byNode := map[string]mark{}
	for k, m := range marks {
		if _, err := uuid.Parse(k.id); err == nil && k.topic == readmodelv1.Topic_TOPIC_NODES {
			byNode[k.id] = m
		}
	}
	if len(byNode) == 0 {
		return nil, nil
	}
	found, err := s.WorkspacesOn(ctx, slices.Sorted(maps.Keys(byNode)))
	if err != nil {
		return nil, err
	}
	shown := map[key]mark{}
	for workspace, node := range found {
		k := key{readmodelv1.Topic_TOPIC_WORKSPACES, workspace}
		if _, ok := marks[k]; !ok {
			shown[k] = mark{pos: byNode[node].pos}
		}
	}
	return shown, nil
}

func loadTopic(ctx context.Context, s *view.Snapshot, topic readmodelv1.Topic, ids []string) ([]item, string, error) {
	page := list.Page{Size: chunk}
	switch topic {
	case readmodelv1.Topic_TOPIC_NODES:
		found, next, err := s.Nodes(ctx, view.NodeFilter{IDs: ids, IncludeRetired: true}, page)
		return each(found, next, err, nodeItem)
	case readmodelv1.Topic_TOPIC_WORKSPACES:
		found, next, err := s.Workspaces(ctx, view.WorkspaceFilter{IDs: ids}, page)
		return each(found, next, err, workspaceItem)
	case readmodelv1.Topic_TOPIC_TASKS:
		return tasks(ctx, s, view.TaskFilter{IDs: ids}, page)
	case readmodelv1.Topic_TOPIC_INSTANCES:
		found, next, err := s.Instances(ctx, view.PerWorkspaceFilter{IDs: ids}, page)
		return each(found, next, err, instanceItem)
	case readmodelv1.Topic_TOPIC_RUNS:
		found, next, err := s.Runs(ctx, view.RunFilter{IDs: ids}, page)
		return each(found, next, err, runItem)
	case readmodelv1.Topic_TOPIC_STEPS:
		return steps(ctx, s, ids, "")
	case readmodelv1.Topic_TOPIC_UNSPECIFIED:
	}
	return nil, "", nil
}

func each[T any](found []T, next string, err error, to func(T) item) ([]item, string, error) {
	if err != nil {
		return nil, "", err
	}
	items := make([]item, len(found))
	for i, x := range found {
		items[i] = to(x)
	}
	return items, next, nil
}

func nodeItem(n *readmodelv1.Node) item {
	return item{
		key:      key{readmodelv1.Topic_TOPIC_NODES, n.GetNodeId()},
		tenantID: n.GetIdentity().GetTenantId(), workspaceID: n.GetIdentity().GetWorkspaceId(), nodeID: n.GetNodeId(),
		message: &readmodelv1.WatchItem{
			Change: unless(n.GetIdentity().GetState() == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED),
			Object: &readmodelv1.WatchItem_Node{Node: n},
		},
	}
}

func workspaceItem(w *readmodelv1.Workspace) item {
	return item{
		key:      key{readmodelv1.Topic_TOPIC_WORKSPACES, w.GetWorkspaceId()},
		tenantID: w.GetTenantId(), workspaceID: w.GetWorkspaceId(), nodeID: w.GetNodeId(),
		message: &readmodelv1.WatchItem{
			Change: unless(w.GetState() == commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED),
			Object: &readmodelv1.WatchItem_Workspace{Workspace: w},
		},
	}
}

func instanceItem(i *lifecyclev1.Instance) item {
	return item{
		key:      key{readmodelv1.Topic_TOPIC_INSTANCES, i.GetInstanceId()},
		tenantID: i.GetTenantId(), workspaceID: i.GetWorkspaceId(), nodeID: i.GetNodeId(),
		message: &readmodelv1.WatchItem{
			Change: unless(i.GetState() == commonv1.InstanceState_INSTANCE_STATE_ENDED),
			Object: &readmodelv1.WatchItem_Instance{Instance: i},
		},
	}
}

func runItem(r *lifecyclev1.Run) item {
	return item{
		key: key{readmodelv1.Topic_TOPIC_RUNS, r.GetRunId()}, tenantID: r.GetTenantId(), workspaceID: r.GetWorkspaceId(),
		message: &readmodelv1.WatchItem{
			Change: readmodelv1.Change_CHANGE_UPDATED,
			Object: &readmodelv1.WatchItem_Run{Run: r},
		},
	}
}

// unless returns the kind of change: destroyed if the object is gone from the snapshots, else updated.
func unless(gone bool) readmodelv1.Change {
	if gone {
		return readmodelv1.Change_CHANGE_DESTROYED
	}
	return readmodelv1.Change_CHANGE_UPDATED
}

// tasks returns one page of tasks as items. The message of a task has no tenant, so the item gets the tenant
// separately.
func tasks(ctx context.Context, s *view.Snapshot, f view.TaskFilter, page list.Page) ([]item, string, error) {
	found, next, err := s.Tasks(ctx, f, page)
	if err != nil {
		return nil, "", err
	}
	owners, err := s.TenantsOfTasks(ctx, found)
	return each(found, next, err, func(t *readmodelv1.Task) item {
		return item{
			key:      key{readmodelv1.Topic_TOPIC_TASKS, t.GetTaskId()},
			tenantID: owners[t.GetTaskId()], workspaceID: t.GetWorkspaceId(), nodeID: t.GetNodeId(),
			message: &readmodelv1.WatchItem{
				Change: readmodelv1.Change_CHANGE_UPDATED,
				Object: &readmodelv1.WatchItem_Task{Task: t},
			},
		}
	})
}

func steps(ctx context.Context, s *view.Snapshot, runIDs []string, next string) ([]item, string, error) {
	runs, _, err := s.Runs(ctx, view.RunFilter{IDs: runIDs}, list.Page{Size: chunk})
	if err != nil {
		return nil, "", err
	}
	tenants := map[string]string{}
	for _, r := range runs {
		tenants[r.GetRunId()] = r.GetTenantId()
	}
	found, err := s.Steps(ctx, runIDs)
	return each(found, next, err, func(a *lifecyclev1.StepAttempt) item {
		return item{
			key: key{readmodelv1.Topic_TOPIC_STEPS, project.StepID(a)}, tenantID: tenants[a.GetRunId()],
			workspaceID: a.GetWorkspaceId(),
			message: &readmodelv1.WatchItem{
				Change: readmodelv1.Change_CHANGE_UPDATED,
				Object: &readmodelv1.WatchItem_Step{Step: a},
			},
		}
	})
}
