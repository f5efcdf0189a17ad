package view

import (
	"context"
	"fmt"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/lookup"
	"github.com/gpuaas/mesh/services/readmodel/status"
)

// TaskFilter narrows a list of tasks. Zero fields do not.
type TaskFilter struct {
	NodeID, WorkspaceID string
	State               commonv1.TaskState
	CurrentOnly         bool
	IDs                 []string
	// NoHistory leaves the transitions out of the returned tasks.
	NoHistory bool
}

const (
	tasksOnNode      list.Condition = "t.node_id = ?::uuid"
	tasksOfWorkspace list.Condition = "t.workspace_id = ?::uuid"
	tasksInState     list.Condition = "t.state = ?"
	tasksCurrent     list.Condition = "(t.state = 'running' OR (t.state IN ('queued', 'dispatched', 'delivered') AND " +
		"(t.expires_at IS NULL OR t.expires_at > ?)))"
	tasksByID list.Condition = "t.task_id = ANY(?::uuid[])"
)

var taskLayout = list.Layout{
	Name: "tasks", Columns: "t.body", From: "readmodel.task t", ID: "t.task_id", Lead: 1, Tenant: "t.tenant_id",
	Conditions: []list.Condition{tasksOnNode, tasksOfWorkspace, tasksInState, tasksCurrent, tasksByID},
}

var listTasks = pg.DefineDynamic(pg.RoleReadmodel, "view.list_tasks", taskLayout.Compose, taskLayout.Samples()...)

// Tasks returns one page, newest first.
func (s *Snapshot) Tasks(ctx context.Context, f TaskFilter, page list.Page) ([]*readmodelv1.Task, string, error) {
	l := list.Request{Layout: &taskLayout, Statement: listTasks, Args: []any{s.scope.Arg()}}
	l.When(f.NodeID != "", tasksOnNode, list.OptionalID(f.NodeID))
	l.When(f.WorkspaceID != "", tasksOfWorkspace, list.OptionalID(f.WorkspaceID))
	l.When(f.State != commonv1.TaskState_TASK_STATE_UNSPECIFIED, tasksInState, names.Of(f.State))
	l.When(f.CurrentOnly, tasksCurrent, s.Now)
	l.When(f.IDs != nil, tasksByID, f.IDs)
	tasks, next, err := run(ctx, s, l, page, s.readTask)
	tasks, next, err = lookup.NamePage(ctx, s.find(), func(t *readmodelv1.Task) lookup.Nameless {
		return lookup.Nameless{
			WorkspaceID: t.GetWorkspaceId(), NodeID: t.GetNodeId(), Workspace: &t.Workspace,
			Node: &t.NodeName,
		}
	}, tasks, next, err)
	if err == nil && !f.NoHistory && len(tasks) > 0 {
		err = s.transitions(ctx, tasks)
	}
	return list.ShownAll(s.scope, tasks), next, err
}

func (s *Snapshot) readTask(row bodyRow) (*readmodelv1.Task, error) {
	t, err := fromBody[lifecyclev1.Task](row)
	if err != nil {
		return nil, err
	}
	return &readmodelv1.Task{
		TaskId: t.GetTaskId(), Type: t.GetType(), NodeId: t.GetNodeId(), State: t.GetState(), Attempt: t.GetAttempt(),
		WorkspaceId: t.GetWorkspaceId(), RunId: t.GetRunId(), Epoch: t.GetEpoch(), OpSeq: t.GetOpSeq(), Reason: t.GetReason(),
		Error: t.GetError(), CreatedAt: t.GetCreatedAt(), ExpiresAt: t.GetExpiresAt(), Current: status.CurrentTask(t, s.Now),
		CorrelationId: t.GetCorrelationId(),
		LateEvidence:  t.GetLateEvidence(), Unknown: t.GetUnknown(),
	}, nil
}

type transitionRow struct {
	TaskID string `db:"task_id" expr:"@.task_id::text"`
	Body   []byte `db:"body"`
}

var transitionsOfTasks = pg.Define(pg.RoleReadmodel, "view.transitions_of_tasks", `
	SELECT `+pg.Columns[transitionRow]("x")+` FROM readmodel.task_transition x
	WHERE x.task_id = ANY($1::uuid[]) ORDER BY x.task_id, x.version, x.n`)

// transitions adds the histories of tasks, in the order in which the changes were made.
func (s *Snapshot) transitions(ctx context.Context, tasks []*readmodelv1.Task) error {
	byID := make(map[string]*readmodelv1.Task, len(tasks))
	ids := make([]string, 0, len(tasks))
	for _, t := range tasks {
		byID[t.GetTaskId()] = t
		ids = append(ids, t.GetTaskId())
	}
	rows, err := pg.All[transitionRow](ctx, s.tx, transitionsOfTasks, ids)
	if err != nil {
		return fmt.Errorf("read transitions: %w", err)
	}
	for _, row := range rows {
		x, err := decode[lifecyclev1.TaskTransition](row.Body)
		if err != nil {
			return fmt.Errorf("read transitions: %w", err)
		}
		byID[row.TaskID].Transitions = append(byID[row.TaskID].Transitions, x)
	}
	return nil
}

// Task returns one task by id.
func (s *Snapshot) Task(ctx context.Context, id string) (*readmodelv1.Task, error) {
	found, _, err := s.Tasks(ctx, TaskFilter{IDs: list.OneID(id)}, list.Page{Size: 1})
	return only(found, err, "task", id)
}

var tenantsOfTasks = pg.Define(pg.RoleReadmodel, "view.tenants_of_tasks", `
	SELECT t.task_id::text AS id, t.tenant_id::text AS text FROM readmodel.task t
		WHERE t.task_id = ANY($1::uuid[]) AND t.tenant_id IS NOT NULL`)

// TenantsOfTasks returns the tenants of tasks, by task id; tasks without a tenant are left out.
func (s *Snapshot) TenantsOfTasks(ctx context.Context, tasks []*readmodelv1.Task) (map[string]string, error) {
	ids := make([]string, 0, len(tasks))
	for _, t := range tasks {
		ids = append(ids, t.GetTaskId())
	}
	owners, err := list.Pairs(ctx, s.tx, tenantsOfTasks, ids)
	if err != nil {
		return nil, fmt.Errorf("read tenants of tasks: %w", err)
	}
	return owners, nil
}
