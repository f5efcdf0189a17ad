package client

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

var taskView = view[*readmodelv1.Task]{
	name: (*readmodelv1.Task).GetTaskId,
	columns: []column[*readmodelv1.Task]{
		{title: "TASK", id: true, path: "task_id"},
		{title: "TYPE", drop: 1, path: "type"},
		{title: "NODE", drop: 2, id: true, path: "node_name|node_id"},
		{title: "STATE", path: "state"},
		{title: "ATTEMPT", drop: 6, path: "attempt"},
		{title: "CREATED", drop: 4, moves: true, path: "created_at"},
		{title: "REASON", drop: 3, path: "reason"},
		{title: "WORKSPACE", path: "workspace|workspace_id", wide: true},
		{title: "WORKSPACE ID", path: "workspace_id", wide: true},
		{title: "NODE ID", path: "node_id", wide: true},
		{title: "EPOCH", path: "epoch", as: nonzero, wide: true},
		{title: "ERROR", path: "error", wide: true},
	},
	more: []column[*readmodelv1.Task]{
		{title: "RUN", path: "run_id"},
		{title: "START BEFORE", path: "expires_at"},
		{title: "LATE EVIDENCE", path: "late_evidence", as: nonzero},
		{title: "CORRELATION", path: "correlation_id"},
		{title: "TRANSITIONS", of: func(_ *printer, t *readmodelv1.Task) string {
			lines := make([]string, 0, len(t.GetTransitions()))
			for i, tr := range t.GetTransitions() {
				lines = append(lines, transitionText(t.GetTransitions(), i, tr))
			}
			return strings.Join(lines, "\n")
		}},
	},
}

// transitionText returns the text of one transition of a task: its time, and how long after the first one it came.
func transitionText(all []*lifecyclev1.TaskTransition, _ int, tr *lifecyclev1.TaskTransition) string {
	since := tr.GetAt().AsTime().Sub(all[0].GetAt().AsTime())
	text := fmt.Sprintf("%s +%s %s", tr.GetAt().AsTime().UTC().Format("15:04:05.000"), since.Round(time.Millisecond),
		enumText(tr.GetState()))
	if tr.GetSessionEpoch() != 0 {
		text += fmt.Sprintf(" (session epoch %d, attempt %d)", tr.GetSessionEpoch(), tr.GetAttempt())
	}
	return strings.TrimSpace(text + " " + tr.GetDetail())
}

func tasksCommand(p *Program) *cobra.Command {
	return group("tasks", "Tasks of node agents", []string{"task"},
		tasksList(p), tasksGet(p), tasksChange(p, "cancel",
			"Cancel a task; one that has not reached its agent ends at once"),
		tasksChange(p, "requeue", "Queue a probe or a collection of diagnostics again that ended without an effect"),
		tasksChange(p, "close", "Close a task whose outcome is unknown and stays so"))
}

func tasksList(p *Program) *cobra.Command {
	var (
		page             paging
		workspace, state string
	)
	req := &readmodelv1.ListTasksRequest{}
	cmd := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List tasks", Example: "  gpuaas tasks list --node node-1 --current",
		Args: args(),
		RunE: p.run(func(ctx context.Context, s *session, _ []string) error {
			var err error
			if req.State, err = parseEnum[commonv1.TaskState]("state", state); err != nil {
				return err
			}
			if page.watch && req.GetNode() != "" { // another node may get the name later
				if req.Node, err = s.find(ctx, kindNode, req.GetNode()); err != nil {
					return err
				}
			}
			if req.WorkspaceId, err = s.workspaceID(ctx, workspace); err != nil {
				return err
			}
			return show(ctx, s, page, source[*readmodelv1.Task]{
				view: taskView, topic: readmodelv1.Topic_TOPIC_TASKS, changed: (*readmodelv1.WatchItem).GetTask,
				keep: func(t *readmodelv1.Task) bool {
					return (req.GetNode() == "" || t.GetNodeId() == req.GetNode()) &&
						(req.GetWorkspaceId() == "" || t.GetWorkspaceId() == req.GetWorkspaceId()) &&
						(req.GetState() == commonv1.TaskState_TASK_STATE_UNSPECIFIED || t.GetState() == req.GetState()) &&
						(t.GetCurrent() || !req.GetCurrentOnly())
				},
				fetch: func(ctx context.Context, size int32, token string) ([]*readmodelv1.Task, string, error) {
					req.PageSize, req.PageToken = size, token
					answer, err := s.query.ListTasks(ctx, req)
					return answer.GetItems(), answer.GetNextPageToken(), err
				},
			})
		}),
	}
	page.flags(cmd)
	cmd.Flags().StringVar(&req.Node, "node", "", "only those of this node")
	cmd.Flags().StringVar(&workspace, "workspace", "", "only those of this workspace")
	cmd.Flags().StringVar(&state, "state", "",
		"only those in this state: "+strings.Join(names.Spellings[commonv1.TaskState](), ", "))
	cmd.Flags().BoolVar(&req.CurrentOnly, "current", false, "only those that have not ended")
	_ = cmd.RegisterFlagCompletionFunc("node", p.completeNodes)
	_ = cmd.RegisterFlagCompletionFunc("workspace", p.completeWorkspaces)
	_ = cmd.RegisterFlagCompletionFunc("state",
		cobra.FixedCompletions(names.Spellings[commonv1.TaskState](), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func tasksGet(p *Program) *cobra.Command {
	return &cobra.Command{
		Use: "get TASK", Aliases: []string{"describe"}, Short: "Show one task with every transition",
		Example: "  gpuaas tasks get 0192f0c1-0000-7000-8000-000000000001", Args: args("TASK"),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			id, err := s.id(ctx, kindTask, args[0])
			if err != nil {
				return err
			}
			answer, err := s.query.GetTask(ctx, &readmodelv1.GetTaskRequest{TaskId: id})
			if err != nil {
				return err
			}
			return one(s.printer, taskView, answer.GetTask())
		}),
	}
}

func tasksChange(p *Program, verb, short string) *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: verb + " TASK", Short: short,
		Example: "  gpuaas tasks " + verb + " 0192f0c1-0000-7000-8000-000000000001 --reason 'why, for the record'",
		Args:    args("TASK"),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			id, err := s.id(ctx, kindTask, args[0])
			if err != nil {
				return err
			}
			answer, err := s.command.ChangeTask(ctx, &readmodelv1.ChangeTaskRequest{TaskId: id, Verb: verb, Reason: reason})
			if err != nil {
				return err
			}
			got, err := s.query.GetTask(ctx,
				&readmodelv1.GetTaskRequest{TaskId: answer.GetTask().GetTaskId(), MinPos: answer.GetPos()})
			if err != nil {
				note(s.err, "done; the view of it is behind (%s), so only the owner's answer is shown",
					names.Of(fault.ReasonOf(err)))
				return one(s.printer, taskView, taskOf(answer.GetTask()))
			}
			return one(s.printer, taskView, got.GetTask())
		}),
	}
	reasonFlag(cmd, &reason, true)
	return cmd
}

// taskOf converts a task from an owner's answer into the form of the projections.
func taskOf(t *lifecyclev1.Task) *readmodelv1.Task {
	return &readmodelv1.Task{
		TaskId: t.GetTaskId(), Type: t.GetType(), NodeId: t.GetNodeId(), State: t.GetState(), Attempt: t.GetAttempt(),
		WorkspaceId: t.GetWorkspaceId(), RunId: t.GetRunId(), Epoch: t.GetEpoch(), OpSeq: t.GetOpSeq(), Reason: t.GetReason(),
		Error: t.GetError(), CreatedAt: t.GetCreatedAt(), ExpiresAt: t.GetExpiresAt(), CorrelationId: t.GetCorrelationId(),
		LateEvidence: t.GetLateEvidence(),
		Current:      !ended(t.GetState()),
	}
}

// ended reports whether a task's state is final.
func ended(state commonv1.TaskState) bool { return state >= commonv1.TaskState_TASK_STATE_SUCCEEDED }
