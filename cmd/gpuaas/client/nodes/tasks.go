package nodes

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// TaskView is how tasks are printed.
var TaskView = output.View[*readmodelv1.Task]{
	Name: (*readmodelv1.Task).GetTaskId,
	Columns: []output.Column[*readmodelv1.Task]{
		{Title: "TASK", ID: true, Path: "task_id"},
		{Title: "TYPE", Drop: 1, Of: func(_ *output.Printer, t *readmodelv1.Task) string { return taskType(t) }},
		{Title: "NODE", Drop: 2, ID: true, Path: "node_name|node_id"},
		{Title: "STATE", Path: "state"},
		{Title: "ATTEMPT", Drop: 6, Path: "attempt"},
		{Title: "CREATED", Drop: 4, Moves: true, Path: "created_at"},
		{Title: "REASON", Drop: 3, Of: taskReason},
		{Title: "WORKSPACE", Path: "workspace|workspace_id", Wide: true},
		{Title: "WORKSPACE ID", Path: "workspace_id", Wide: true},
		{Title: "NODE ID", Path: "node_id", Wide: true},
		{Title: "EPOCH", Path: "epoch", As: output.NonZero, Wide: true},
		{Title: "ERROR", Path: "error", Wide: true},
	},
	More: []output.Column[*readmodelv1.Task]{
		{Title: "RUN", Path: "run_id"},
		{Title: "START BEFORE", Path: "expires_at"},
		{Title: "LATE EVIDENCE", Path: "late_evidence", As: output.NonZero},
		{Title: "CORRELATION", Path: "correlation_id"},
		{Title: "TRANSITIONS", Of: func(_ *output.Printer, t *readmodelv1.Task) string {
			return strings.Join(kit.TextsOf(t.GetTransitions(), func(tr *lifecyclev1.TaskTransition) string {
				return transitionText(t.GetTransitions(), tr)
			}), "\n")
		}},
	},
}

// transitionText returns the text of one transition of a task: its time, and how long after the first one it came.
func transitionText(all []*lifecyclev1.TaskTransition, tr *lifecyclev1.TaskTransition) string {
	since := tr.GetAt().AsTime().Sub(all[0].GetAt().AsTime())
	text := fmt.Sprintf("%s +%s %s", tr.GetAt().AsTime().UTC().Format("15:04:05.000"), since.Round(time.Millisecond),
		human.Enum(tr.GetState()))
	if tr.GetSessionEpoch() != 0 {
		text += fmt.Sprintf(" (session epoch %d, attempt %d)", tr.GetSessionEpoch(), tr.GetAttempt())
	}
	return strings.TrimSpace(text + " " + tr.GetDetail())
}

// TasksCommand returns the commands about the tasks of node agents.
func TasksCommand(p *kit.Program) *cobra.Command {
	return kit.Group("tasks", "Tasks of node agents", []string{"task"},
		tasksList(p), tasksGet(p), tasksChange(p, "cancel",
			"Cancel a task; one that has not reached its agent ends at once"),
		tasksChange(p, "requeue", "Queue a probe or a collection of diagnostics again that ended without an effect"),
		tasksChange(p, "close", "Close a task whose outcome is unknown and stays so"))
}

func tasksList(p *kit.Program) *cobra.Command {
	var (
		page             kit.Paging
		workspace, state string
	)
	req := &readmodelv1.ListTasksRequest{}
	cmd := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List tasks", Example: "  gpuaas tasks list --node node-1 --current",
		Args: kit.Args(),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			var err error
			if req.State, err = kit.ParseEnum[commonv1.TaskState]("state", state); err != nil {
				return err
			}
			if page.Watch && req.GetNode() != "" { // another node may get the name later
				if req.Node, err = s.Find(ctx, kit.KindNode, req.GetNode()); err != nil {
					return err
				}
			}
			if req.WorkspaceId, err = s.WorkspaceID(ctx, workspace); err != nil {
				return err
			}
			return kit.Show(ctx, s, page, kit.Source[*readmodelv1.Task]{
				View: TaskView, Topic: readmodelv1.Topic_TOPIC_TASKS, Changed: (*readmodelv1.WatchItem).GetTask,
				Keep: func(t *readmodelv1.Task) bool {
					return (req.GetNode() == "" || t.GetNodeId() == req.GetNode()) &&
						(req.GetWorkspaceId() == "" || t.GetWorkspaceId() == req.GetWorkspaceId()) &&
						(req.GetState() == commonv1.TaskState_TASK_STATE_UNSPECIFIED || t.GetState() == req.GetState()) &&
						(t.GetCurrent() || !req.GetCurrentOnly())
				},
				Fetch: kit.Method(s.Query.ListTasks, req),
			})
		}),
	}
	page.Flags(cmd)
	cmd.Flags().StringVar(&req.Node, "node", "", "only those of this node")
	p.WorkspaceFlag(cmd, &workspace)
	kit.EnumFlag[commonv1.TaskState](cmd, &state, "state", "only those in this state: %s")
	cmd.Flags().BoolVar(&req.CurrentOnly, "current", false, "only those that have not ended")
	_ = cmd.RegisterFlagCompletionFunc("node", p.CompleteNodes)
	return cmd
}

func tasksGet(p *kit.Program) *cobra.Command {
	return &cobra.Command{
		Use: "get TASK", Aliases: []string{"describe"}, Short: "Show one task with every transition",
		Example: "  gpuaas tasks get 0192f0c1-0000-7000-8000-000000000001", Args: kit.Args("TASK"),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			id, err := s.ID(ctx, kit.KindTask, args[0])
			if err != nil {
				return err
			}
			return kit.Get(ctx, s, TaskView, s.Query.GetTask, &readmodelv1.GetTaskRequest{TaskId: id},
				(*readmodelv1.GetTaskResponse).GetTask)
		}),
	}
}

func tasksChange(p *kit.Program, verb, short string) *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: verb + " TASK", Short: short,
		Example: "  gpuaas tasks " + verb + " 0192f0c1-0000-7000-8000-000000000001 --reason 'why, for the record'",
		Args:    kit.Args("TASK"),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			id, err := s.ID(ctx, kit.KindTask, args[0])
			if err != nil {
				return err
			}
			answer, err := s.Command.ChangeTask(ctx, &readmodelv1.ChangeTaskRequest{TaskId: id, Verb: verb, Reason: reason})
			if err != nil {
				return err
			}
			got, err := s.Query.GetTask(ctx,
				&readmodelv1.GetTaskRequest{TaskId: answer.GetTask().GetTaskId(), MinPos: answer.GetPos()})
			if err != nil {
				human.Note(s.Err, "done; the view of it is behind (%s), so only the owner's answer is shown",
					names.Of(fault.ReasonOf(err)))
				return output.One(s.Printer, TaskView, taskOf(answer.GetTask()))
			}
			return output.One(s.Printer, TaskView, got.GetTask())
		}),
	}
	kit.ReasonFlag(cmd, &reason, true)
	return cmd
}

// taskType returns the type of a task, or what a newer build has stored where this one does not know it.
func taskType(t *readmodelv1.Task) string {
	if t.GetType() == commonv1.TaskType_TASK_TYPE_UNSPECIFIED && t.GetUnknown() != "" {
		return t.GetUnknown() + ofNewer
	}
	return human.Enum(t.GetType())
}

// taskReason returns the reason of a task, or what a newer build has stored where this one does not know it. Of a task
// whose type is unknown too, the stored type is shown alone.
func taskReason(_ *output.Printer, t *readmodelv1.Task) string {
	if t.GetType() != commonv1.TaskType_TASK_TYPE_UNSPECIFIED && t.GetUnknown() != "" {
		return t.GetUnknown() + ofNewer
	}
	return human.Enum(t.GetReason())
}

// ofNewer stands behind a value of an enum that this build does not know.
const ofNewer = " (of a newer version)"

// taskOf converts a task from an owner's answer into the form of the projections.
func taskOf(t *lifecyclev1.Task) *readmodelv1.Task {
	return &readmodelv1.Task{
		TaskId: t.GetTaskId(), Type: t.GetType(), NodeId: t.GetNodeId(), State: t.GetState(), Attempt: t.GetAttempt(),
		WorkspaceId: t.GetWorkspaceId(), RunId: t.GetRunId(), Epoch: t.GetEpoch(), OpSeq: t.GetOpSeq(), Reason: t.GetReason(),
		Error: t.GetError(), CreatedAt: t.GetCreatedAt(), ExpiresAt: t.GetExpiresAt(), CorrelationId: t.GetCorrelationId(),
		LateEvidence: t.GetLateEvidence(), Unknown: t.GetUnknown(),
		Current: !ended(t.GetState()),
	}
}

// ended reports whether a task's state is final.
func ended(state commonv1.TaskState) bool { return state >= commonv1.TaskState_TASK_STATE_SUCCEEDED }
