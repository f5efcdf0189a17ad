package view

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/readmodel/project"
)

// message is a pointer to a generated message.
type message[T any] interface {
	*T
	proto.Message
}

// scanBody reads a row whose only column is its body.
func scanBody[T any, M message[T]](row pgx.Row, lead ...any) (M, error) {
	var body []byte
	if err := row.Scan(append(lead, &body)...); err != nil {
		return nil, err //nolint:wrapcheck // wrapped by run
	}
	m := M(new(T))
	return m, project.Decode(body, m)
}

// TaskFilter narrows a list of tasks. Zero fields do not.
type TaskFilter struct {
	NodeID, WorkspaceID string
	State               commonv1.TaskState
	CurrentOnly         bool
	IDs                 []string
	// NoHistory leaves transitions out of what is answered.
	NoHistory bool
}

// Tasks answers one page, newest first.
func (s *Snapshot) Tasks(ctx context.Context, f TaskFilter, page Page) ([]*readmodelv1.Task, string, error) {
	l := listing{
		name: "tasks", columns: "t.body", from: "readmodel.task t", id: "t.task_id",
	}
	l.and("(?::uuid IS NULL OR t.tenant_id = $1)", s.scope.arg())
	if f.NodeID != "" {
		l.and("t.node_id = ?::uuid", optional(f.NodeID))
	}
	if f.WorkspaceID != "" {
		l.and("t.workspace_id = ?::uuid", optional(f.WorkspaceID))
	}
	if f.State != commonv1.TaskState_TASK_STATE_UNSPECIFIED {
		l.and("t.state = ?", names.Of(f.State))
	}
	if f.CurrentOnly {
		l.and("(t.state = 'running' OR (t.state IN ('queued', 'dispatched', 'delivered') AND (t.expires_at IS NULL OR t.expires_at > ?)))", s.Now)
	}
	if f.IDs != nil {
		l.and("t.task_id = ANY(?::uuid[])", f.IDs)
	}
	tasks, next, err := run(ctx, s, l, page, s.scanTask)
	tasks, next, err = namedPage(ctx, s, func(t *readmodelv1.Task) nameless {
		return nameless{workspaceID: t.GetWorkspaceId(), nodeID: t.GetNodeId(), workspace: &t.Workspace, node: &t.NodeName}
	}, tasks, next, err)
	if err != nil || f.NoHistory || len(tasks) == 0 {
		return tasks, next, err
	}
	return tasks, next, s.transitions(ctx, tasks)
}

func (s *Snapshot) scanTask(row pgx.Row, lead ...any) (*readmodelv1.Task, error) {
	var body []byte
	if err := row.Scan(append(lead, &body)...); err != nil {
		return nil, err //nolint:wrapcheck // wrapped by run
	}
	t := &lifecyclev1.Task{}
	if err := project.Decode(body, t); err != nil {
		return nil, err //nolint:wrapcheck // wrapped by run
	}
	return &readmodelv1.Task{
		TaskId: t.GetTaskId(), Type: t.GetType(), NodeId: t.GetNodeId(), State: t.GetState(), Attempt: t.GetAttempt(),
		WorkspaceId: t.GetWorkspaceId(), RunId: t.GetRunId(), Epoch: t.GetEpoch(), OpSeq: t.GetOpSeq(), Reason: t.GetReason(), Error: t.GetError(),
		CreatedAt: t.GetCreatedAt(), ExpiresAt: t.GetExpiresAt(), Current: CurrentTask(t, s.Now), CorrelationId: t.GetCorrelationId(),
		LateEvidence: t.GetLateEvidence(),
	}, nil
}

// transitions adds the histories of tasks, in the order in which the changes were made.
func (s *Snapshot) transitions(ctx context.Context, tasks []*readmodelv1.Task) error {
	byID := make(map[string]*readmodelv1.Task, len(tasks))
	ids := make([]string, 0, len(tasks))
	for _, t := range tasks {
		byID[t.GetTaskId()] = t
		ids = append(ids, t.GetTaskId())
	}
	rows, err := s.tx.Query(ctx, `SELECT x.task_id::text, x.body FROM readmodel.task_transition x
		WHERE x.task_id = ANY($1::uuid[]) ORDER BY x.task_id, x.version, x.n`, ids)
	if err != nil {
		return fmt.Errorf("read transitions: %w", err)
	}
	var id string
	var body []byte
	_, err = pgx.ForEachRow(rows, []any{&id, &body}, func() error {
		x := &lifecyclev1.TaskTransition{}
		if err := project.Decode(body, x); err != nil {
			return err //nolint:wrapcheck // wrapped below
		}
		byID[id].Transitions = append(byID[id].Transitions, x)
		return nil
	})
	if err != nil {
		return fmt.Errorf("read transitions: %w", err)
	}
	return nil
}

// Task answers one by id.
func (s *Snapshot) Task(ctx context.Context, id string) (*readmodelv1.Task, error) {
	found, _, err := s.Tasks(ctx, TaskFilter{IDs: idList(id)}, Page{Size: 1})
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, notFound("task")
	}
	return found[0], nil
}

// BoxFilter narrows lists of instances, claims and allocations. Zero fields do not.
type BoxFilter struct {
	WorkspaceID string
	LiveOnly    bool // instances
	Orphaned    bool // claims
	Released    bool // claims: those too
	IDs         []string
}

func (s *Snapshot) boxes(name, table, id string, f BoxFilter) listing {
	l := listing{name: name, columns: "x.body", from: table + " x", id: "x." + id}
	l.and("(?::uuid IS NULL OR x.tenant_id = $1)", s.scope.arg())
	if f.WorkspaceID != "" {
		l.and("x.workspace_id = ?::uuid", optional(f.WorkspaceID))
	}
	if f.IDs != nil {
		l.and("x."+id+" = ANY(?::uuid[])", f.IDs)
	}
	return l
}

// Instances answers one page, newest first.
func (s *Snapshot) Instances(ctx context.Context, f BoxFilter, page Page) ([]*lifecyclev1.Instance, string, error) {
	l := s.boxes("instances", "readmodel.instance", "instance_id", f)
	if f.LiveOnly {
		l.and("x.live")
	}
	items, next, err := run(ctx, s, l, page, scanBody[lifecyclev1.Instance])
	return namedPage(ctx, s, func(i *lifecyclev1.Instance) nameless {
		return nameless{workspaceID: i.GetWorkspaceId(), nodeID: i.GetNodeId(), workspace: &i.Workspace, node: &i.NodeName}
	}, items, next, err)
}

// Claims answers one page, newest first.
func (s *Snapshot) Claims(ctx context.Context, f BoxFilter, page Page) ([]*lifecyclev1.Claim, string, error) {
	l := s.boxes("claims", "readmodel.claim", "claim_id", f)
	if f.Orphaned {
		l.and("x.orphaned")
	}
	if !f.Released {
		l.and("NOT x.released")
	}
	items, next, err := run(ctx, s, l, page, scanBody[lifecyclev1.Claim])
	return namedPage(ctx, s, func(c *lifecyclev1.Claim) nameless {
		return nameless{workspaceID: c.GetWorkspaceId(), nodeID: c.GetNodeId(), workspace: &c.Workspace, node: &c.NodeName}
	}, items, next, err)
}

// Allocations answers one page, newest first.
func (s *Snapshot) Allocations(ctx context.Context, f BoxFilter, page Page) ([]*lifecyclev1.Allocation, string, error) {
	items, next, err := run(ctx, s, s.boxes("allocations", "readmodel.allocation", "allocation_id", f), page, scanBody[lifecyclev1.Allocation])
	return namedPage(ctx, s, func(a *lifecyclev1.Allocation) nameless {
		return nameless{workspaceID: a.GetWorkspaceId(), nodeID: a.GetNodeId(), workspace: &a.Workspace, node: &a.NodeName}
	}, items, next, err)
}

// Allocation answers one hold.
func (s *Snapshot) Allocation(ctx context.Context, id string) (*lifecyclev1.Allocation, error) {
	found, _, err := s.Allocations(ctx, BoxFilter{IDs: idList(id)}, Page{Size: 1})
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, notFound("allocation")
	}
	return found[0], nil
}

// RunFilter narrows a list of runs. Zero fields do not.
type RunFilter struct {
	WorkspaceID string
	LiveOnly    bool
	IDs         []string
}

// Runs answers one page, newest first.
func (s *Snapshot) Runs(ctx context.Context, f RunFilter, page Page) ([]*lifecyclev1.Run, string, error) {
	l := s.boxes("runs", "readmodel.run", "run_id", BoxFilter{WorkspaceID: f.WorkspaceID, IDs: f.IDs})
	if f.LiveOnly {
		l.and("x.live")
	}
	return run(ctx, s, l, page, scanBody[lifecyclev1.Run])
}

// Steps answers all attempts of runs, in the order of the steps. It is scoped by the runs' tenants. What a step left for later ones is the saga's own
// and is not answered.
func (s *Snapshot) Steps(ctx context.Context, runIDs []string) ([]*lifecyclev1.StepAttempt, error) {
	rows, err := s.tx.Query(ctx, `SELECT t.body FROM readmodel.step t JOIN readmodel.run r ON r.run_id = t.run_id
		WHERE t.run_id = ANY($2::uuid[]) AND ($1::uuid IS NULL OR r.tenant_id = $1)
		ORDER BY t.run_id, t.step, t.direction, t.attempt LIMIT 10000`, s.scope.arg(), runIDs)
	if err != nil {
		return nil, fmt.Errorf("list steps: %w", err)
	}
	steps, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (*lifecyclev1.StepAttempt, error) {
		a, err := scanBody[lifecyclev1.StepAttempt](row)
		if err == nil {
			a.Output = nil
			a = s.scope.Step(a)
		}
		return a, err
	})
	if err != nil {
		return nil, fmt.Errorf("list steps: %w", err)
	}
	return steps, nil
}

// idList is an id as a filter: what is no id names nothing.
func idList(id string) []string {
	if !isUUID(id) {
		return []string{}
	}
	return []string{id}
}

// TenantsOfTasks answers whose tasks are, by task id; nobody's are left out.
func (s *Snapshot) TenantsOfTasks(ctx context.Context, tasks []*readmodelv1.Task) (map[string]string, error) {
	owners := map[string]string{}
	ids := make([]string, 0, len(tasks))
	for _, t := range tasks {
		ids = append(ids, t.GetTaskId())
	}
	rows, err := s.tx.Query(ctx, `SELECT t.task_id::text, t.tenant_id::text FROM readmodel.task t
		WHERE t.task_id = ANY($1::uuid[]) AND t.tenant_id IS NOT NULL`, ids)
	if err != nil {
		return nil, fmt.Errorf("read tenants of tasks: %w", err)
	}
	var task, tenant string
	if _, err := pgx.ForEachRow(rows, []any{&task, &tenant}, func() error { owners[task] = tenant; return nil }); err != nil {
		return nil, fmt.Errorf("read tenants of tasks: %w", err)
	}
	return owners, nil
}
