package view

import (
	"context"
	"fmt"

	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/project"
)

// message is a pointer to a generated message.
type message[T any] interface {
	*T
	proto.Message
}

// bodyRow is a row of a list whose only column is its body.
type bodyRow struct {
	place
	Body []byte `db:"body"`
}

// decode decodes a body into a new message.
func decode[T any, M message[T]](body []byte) (M, error) {
	m := M(new(T))
	return m, project.Decode(body, m)
}

// fromBody reads the row of a list.
func fromBody[T any, M message[T]](row bodyRow) (M, error) { return decode[T, M](row.Body) }

// fromBodies reads the bodies of other rows.
func fromBodies[T any, M message[T]](bodies [][]byte) ([]M, error) {
	out := make([]M, 0, len(bodies))
	for _, body := range bodies {
		m, err := decode[T, M](body)
		if err != nil {
			return nil, err
		}
		out = append(out, m)
	}
	return out, nil
}

// pair is a row of two texts: an id and what belongs to it.
type pair struct {
	ID   string `db:"id"`
	Text string `db:"text"`
}

// pairs runs a statement of pairs and returns them by id.
func (s *Snapshot) pairs(ctx context.Context, statement *pg.Statement, args ...any) (map[string]string, error) {
	rows, err := pg.All[pair](ctx, s.tx, statement, args...)
	if err != nil {
		return nil, err
	}
	found := make(map[string]string, len(rows))
	for _, row := range rows {
		found[row.ID] = row.Text
	}
	return found, nil
}

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
	tasksOnNode      condition = "t.node_id = ?::uuid"
	tasksOfWorkspace condition = "t.workspace_id = ?::uuid"
	tasksInState     condition = "t.state = ?"
	tasksCurrent     condition = "(t.state = 'running' OR (t.state IN ('queued', 'dispatched', 'delivered') AND (t.expires_at IS NULL OR t.expires_at > ?)))"
	tasksByID        condition = "t.task_id = ANY(?::uuid[])"
)

var taskLayout = layout{
	name: "tasks", columns: "t.body", from: "readmodel.task t", id: "t.task_id", lead: 1, tenant: "t.tenant_id",
	conditions: []condition{tasksOnNode, tasksOfWorkspace, tasksInState, tasksCurrent, tasksByID},
}

var listTasks = pg.DefineDynamic(pg.RoleReadmodel, "view.list_tasks", taskLayout.compose, taskLayout.samples()...)

// Tasks returns one page, newest first.
func (s *Snapshot) Tasks(ctx context.Context, f TaskFilter, page Page) ([]*readmodelv1.Task, string, error) {
	l := listing{layout: &taskLayout, statement: listTasks, args: []any{s.scope.arg()}}
	if f.NodeID != "" {
		l.and(tasksOnNode, optional(f.NodeID))
	}
	if f.WorkspaceID != "" {
		l.and(tasksOfWorkspace, optional(f.WorkspaceID))
	}
	if f.State != commonv1.TaskState_TASK_STATE_UNSPECIFIED {
		l.and(tasksInState, names.Of(f.State))
	}
	if f.CurrentOnly {
		l.and(tasksCurrent, s.Now)
	}
	if f.IDs != nil {
		l.and(tasksByID, f.IDs)
	}
	tasks, next, err := run(ctx, s, l, page, s.readTask)
	tasks, next, err = namedPage(ctx, s, func(t *readmodelv1.Task) nameless {
		return nameless{workspaceID: t.GetWorkspaceId(), nodeID: t.GetNodeId(), workspace: &t.Workspace, node: &t.NodeName}
	}, tasks, next, err)
	if err != nil || f.NoHistory || len(tasks) == 0 {
		return tasks, next, err
	}
	return tasks, next, s.transitions(ctx, tasks)
}

func (s *Snapshot) readTask(row bodyRow) (*readmodelv1.Task, error) {
	t, err := fromBody[lifecyclev1.Task](row)
	if err != nil {
		return nil, err
	}
	return &readmodelv1.Task{
		TaskId: t.GetTaskId(), Type: t.GetType(), NodeId: t.GetNodeId(), State: t.GetState(), Attempt: t.GetAttempt(),
		WorkspaceId: t.GetWorkspaceId(), RunId: t.GetRunId(), Epoch: t.GetEpoch(), OpSeq: t.GetOpSeq(), Reason: t.GetReason(),
		Error: t.GetError(), CreatedAt: t.GetCreatedAt(), ExpiresAt: t.GetExpiresAt(), Current: CurrentTask(t, s.Now),
		CorrelationId: t.GetCorrelationId(),
		LateEvidence:  t.GetLateEvidence(),
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
	found, _, err := s.Tasks(ctx, TaskFilter{IDs: idList(id)}, Page{Size: 1})
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, notFound("task")
	}
	return found[0], nil
}

// PerWorkspaceFilter narrows lists of instances, claims and allocations. Zero fields do not.
type PerWorkspaceFilter struct {
	WorkspaceID string
	NodeID      string // instances
	LiveOnly    bool   // instances
	Orphaned    bool   // claims
	Released    bool   // claims: include released ones
	IDs         []string
}

const (
	ofWorkspace   condition = "x.workspace_id = ?::uuid"
	onNode        condition = "x.node_id = ?::uuid"
	live          condition = "x.live"
	orphaned      condition = "x.orphaned"
	unreleased    condition = "NOT x.released"
	ofWorkspaces  condition = "x.workspace_id::text = ANY(?)"
	detectedFrom  condition = "x.detected_at >= ?"
	detectedUntil condition = "x.detected_at <= ?"
	isOpen        condition = "x.open"
	theFinding    condition = "x.finding_id = ?::uuid"
)

// perWorkspaceLayout returns the layout of a list of objects that belong to workspaces.
func perWorkspaceLayout(name, table, id string, more ...condition) layout {
	return layout{
		name: name, columns: "x.body", from: "readmodel." + table + " x", id: "x." + id, lead: 1, tenant: "x.tenant_id",
		conditions: append([]condition{ofWorkspace, byIDs(id)}, more...),
	}
}

func byIDs(id string) condition { return condition("x." + id + " = ANY(?::uuid[])") }

var (
	instanceLayout   = perWorkspaceLayout("instances", "instance", "instance_id", live, onNode)
	claimLayout      = perWorkspaceLayout("claims", "claim", "claim_id", orphaned, unreleased)
	allocationLayout = perWorkspaceLayout("allocations", "allocation", "allocation_id")
	runLayout        = perWorkspaceLayout("runs", "run", "run_id", live)
	recoveryLayout   = perWorkspaceLayout("recoveries", "recovery_record", "record_id", ofWorkspaces, detectedFrom,
		detectedUntil)

	listInstances = pg.DefineDynamic(pg.RoleReadmodel, "view.list_instances", instanceLayout.compose,
		instanceLayout.samples()...)
	listClaims      = pg.DefineDynamic(pg.RoleReadmodel, "view.list_claims", claimLayout.compose, claimLayout.samples()...)
	listAllocations = pg.DefineDynamic(pg.RoleReadmodel, "view.list_allocations", allocationLayout.compose,
		allocationLayout.samples()...)
	listRuns       = pg.DefineDynamic(pg.RoleReadmodel, "view.list_runs", runLayout.compose, runLayout.samples()...)
	listRecoveries = pg.DefineDynamic(pg.RoleReadmodel, "view.list_recoveries", recoveryLayout.compose,
		recoveryLayout.samples()...)
)

func (s *Snapshot) perWorkspace(of *layout, statement *pg.Dynamic[parts], f PerWorkspaceFilter) listing {
	l := listing{layout: of, statement: statement, args: []any{s.scope.arg()}}
	if f.WorkspaceID != "" {
		l.and(ofWorkspace, optional(f.WorkspaceID))
	}
	if f.IDs != nil {
		l.and(of.conditions[1], f.IDs)
	}
	return l
}

// Instances returns one page, newest first.
func (s *Snapshot) Instances(ctx context.Context, f PerWorkspaceFilter, page Page) ([]*lifecyclev1.Instance, string,
	error,
) {
	l := s.perWorkspace(&instanceLayout, listInstances, f)
	if f.NodeID != "" {
		l.and(onNode, f.NodeID)
	}
	if f.LiveOnly {
		l.and(live)
	}
	items, next, err := run(ctx, s, l, page, fromBody[lifecyclev1.Instance])
	return namedPage(ctx, s, func(i *lifecyclev1.Instance) nameless {
		return nameless{workspaceID: i.GetWorkspaceId(), nodeID: i.GetNodeId(), workspace: &i.Workspace, node: &i.NodeName}
	}, items, next, err)
}

// Claims returns one page, newest first.
func (s *Snapshot) Claims(ctx context.Context, f PerWorkspaceFilter, page Page) ([]*lifecyclev1.Claim, string, error) {
	l := s.perWorkspace(&claimLayout, listClaims, f)
	if f.Orphaned {
		l.and(orphaned)
	}
	if !f.Released {
		l.and(unreleased)
	}
	items, next, err := run(ctx, s, l, page, fromBody[lifecyclev1.Claim])
	return namedPage(ctx, s, func(c *lifecyclev1.Claim) nameless {
		return nameless{workspaceID: c.GetWorkspaceId(), nodeID: c.GetNodeId(), workspace: &c.Workspace, node: &c.NodeName}
	}, items, next, err)
}

// Allocations returns one page, newest first.
func (s *Snapshot) Allocations(ctx context.Context, f PerWorkspaceFilter, page Page) ([]*lifecyclev1.Allocation, string,
	error,
) {
	items, next, err := run(ctx, s, s.perWorkspace(&allocationLayout, listAllocations, f), page,
		fromBody[lifecyclev1.Allocation])
	return namedPage(ctx, s, func(a *lifecyclev1.Allocation) nameless {
		return nameless{workspaceID: a.GetWorkspaceId(), nodeID: a.GetNodeId(), workspace: &a.Workspace, node: &a.NodeName}
	}, items, next, err)
}

// Allocation returns one allocation by id.
func (s *Snapshot) Allocation(ctx context.Context, id string) (*lifecyclev1.Allocation, error) {
	found, _, err := s.Allocations(ctx, PerWorkspaceFilter{IDs: idList(id)}, Page{Size: 1})
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

// Runs returns one page, newest first.
func (s *Snapshot) Runs(ctx context.Context, f RunFilter, page Page) ([]*lifecyclev1.Run, string, error) {
	l := s.perWorkspace(&runLayout, listRuns, PerWorkspaceFilter{WorkspaceID: f.WorkspaceID, IDs: f.IDs})
	if f.LiveOnly {
		l.and(live)
	}
	return run(ctx, s, l, page, fromBody[lifecyclev1.Run])
}

// stepsPage is how many attempts one statement reads.
const stepsPage = 10000

// stepRow is an attempt with its place in the order of the attempts.
type stepRow struct {
	RunID     string `db:"run_id" expr:"@.run_id::text"`
	Step      int32  `db:"step"`
	Direction string `db:"direction"`
	Attempt   int32  `db:"attempt"`
	Body      []byte `db:"body"`
}

// stepsOfRuns reads the attempts of runs, those after a place in their order if after is true.
var stepsOfRuns = pg.DefineDynamic(pg.RoleReadmodel, "view.steps_of_runs", func(after bool) string {
	next := ""
	if after {
		next = " AND (t.run_id, t.step, t.direction, t.attempt) > ($4::uuid, $5::integer, $6::text, $7::integer)"
	}
	return `SELECT ` + pg.Columns[stepRow]("t") + ` FROM readmodel.step t JOIN readmodel.run r ON r.run_id = t.run_id
	WHERE r.run_id = ANY($2::uuid[]) AND ($1::uuid IS NULL OR r.tenant_id = $1) AND t.run_id = ANY($2::uuid[])` + next + `
	ORDER BY t.run_id, t.step, t.direction, t.attempt LIMIT $3`
}, false, true)

// Steps returns all attempts of runs, by run and in the order of the steps. It is scoped by the runs' tenants. The
// outputs that a step left for later steps are internal to the saga and are not returned.
func (s *Snapshot) Steps(ctx context.Context, runIDs []string) ([]*lifecyclev1.StepAttempt, error) {
	var steps []*lifecyclev1.StepAttempt
	args := []any{s.scope.arg(), runIDs, stepsPage}
	for after := false; ; after = true {
		rows, err := pg.All[stepRow](ctx, s.tx, stepsOfRuns.For(after), args...)
		if err != nil {
			return nil, fmt.Errorf("list steps: %w", err)
		}
		for _, row := range rows {
			a, err := decode[lifecyclev1.StepAttempt](row.Body)
			if err != nil {
				return nil, fmt.Errorf("list steps: %w", err)
			}
			a.Output = nil
			steps = append(steps, s.scope.Step(a))
		}
		if len(rows) < stepsPage {
			return steps, nil
		}
		last := rows[len(rows)-1]
		args = append(args[:3], last.RunID, last.Step, last.Direction, last.Attempt)
	}
}

// idList returns the filter for one id. A text that is no id matches nothing.
func idList(id string) []string {
	if !isUUID(id) {
		return []string{}
	}
	return []string{id}
}

var tenantsOfTasks = pg.Define(pg.RoleReadmodel, "view.tenants_of_tasks", `
	SELECT t.task_id::text AS id, t.tenant_id::text AS text FROM readmodel.task t WHERE t.task_id = ANY($1::uuid[]) AND t.tenant_id IS NOT NULL`)

// TenantsOfTasks returns the tenants of tasks, by task id; tasks without a tenant are left out.
func (s *Snapshot) TenantsOfTasks(ctx context.Context, tasks []*readmodelv1.Task) (map[string]string, error) {
	ids := make([]string, 0, len(tasks))
	for _, t := range tasks {
		ids = append(ids, t.GetTaskId())
	}
	owners, err := s.pairs(ctx, tenantsOfTasks, ids)
	if err != nil {
		return nil, fmt.Errorf("read tenants of tasks: %w", err)
	}
	return owners, nil
}
