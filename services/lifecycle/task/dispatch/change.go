package dispatch

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/lifecycle/rollback"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// ChangeTask cancels, requeues or closes a task.
func (s *Server) ChangeTask(ctx context.Context, req *lifecyclev1.ChangeTaskRequest) (*lifecyclev1.ChangeTaskResponse,
	error,
) {
	by := rpc.ActorFrom(ctx)
	res := &lifecyclev1.ChangeTaskResponse{}
	e := audit.Entry{
		Action: "task." + names.Of(req.GetVerb()), Reason: req.GetReason(), SubjectType: "task",
		SubjectID: req.GetTaskId(),
	}
	var changed task.Row
	err := pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		if err := rollback.Refuse(ctx, tx); err != nil {
			return err
		}
		r, err := task.One(ctx, tx, lockTask, req.GetTaskId())
		if errors.Is(err, pgx.ErrNoRows) {
			return fault.NoSuch("task", req.GetTaskId())
		}
		if err != nil {
			return fmt.Errorf("read task: %w", err)
		}
		var pos string
		switch req.GetVerb() {
		case lifecyclev1.TaskVerb_TASK_VERB_CANCEL:
			changed, pos, err = s.cancel(ctx, tx, r, req.GetReason()+" ("+by+")")
		case lifecyclev1.TaskVerb_TASK_VERB_REQUEUE:
			changed, pos, err = s.requeue(ctx, tx, r, req.GetReason()+" ("+by+")")
		case lifecyclev1.TaskVerb_TASK_VERB_CLOSE:
			changed, pos, err = s.closeUnknown(ctx, tx, r, req.GetReason()+" ("+by+")")
		default:
			err = fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "no such verb")
		}
		if err != nil {
			return err
		}
		e.TenantID, e.WorkspaceID, e.WorkflowID, e.NodeID = r.TenantID, r.WorkspaceID, r.RunID, r.NodeID
		e.Details = map[string]any{"type": r.Type, "was": r.State, "state": changed.State}
		if _, err := s.deps.Audit.Record(ctx, tx, e); err != nil {
			return err
		}
		res.Task, res.Pos = changed.Proto(), pos
		return nil
	})
	if err != nil {
		return nil, s.deps.Audit.Refuse(ctx, e, err)
	}
	s.deps.Committed()
	s.Announce([]task.Row{changed}, req.GetReason())
	return res, nil
}

// CancelOfRun requests that every unfinished task which a run's steps queued in the forward phase stop, in the caller's
// transaction, except those of the step with the key: the steps of a teardown are in the forward phase, and one that is
// called again must not stop its own. The caller passes the returned rows to Announce after the commit.
func (s *Server) CancelOfRun(ctx context.Context, tx pgx.Tx, runID, exceptKey, reason string) ([]task.Row, error) {
	list, err := task.All(ctx, tx, lockOpenOfRun, runID, exceptKey)
	if err != nil {
		return nil, fmt.Errorf("read tasks of run: %w", err)
	}
	for i, r := range list {
		if list[i], _, err = s.cancel(ctx, tx, r, reason); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// Withdraw is CancelOfRun for a run that is being cancelled. It announces the tasks itself, right after the commit of
// tx; if tx is not one of pg.InTx, the hub's next sweep does.
func (s *Server) Withdraw(ctx context.Context, tx pgx.Tx, runID, reason string) error {
	rows, err := s.CancelOfRun(ctx, tx, runID, "", reason)
	if err != nil || len(rows) == 0 {
		return err
	}
	pg.OnEnd(tx, func(committed bool) {
		if committed {
			s.Announce(rows, reason)
		}
	})
	return nil
}

// Announce sends replicas the hints that changed tasks need: that a node has work, or that a task is to stop. It is
// called after the commit of the change.
func (s *Server) Announce(rows []task.Row, reason string) {
	for _, r := range rows {
		switch {
		case r.State == commonv1.TaskState_TASK_STATE_QUEUED:
			s.deps.Hub.Notify(r.NodeID)
		case r.CancelAsked && !task.Terminal(r.State):
			s.deps.Hub.Cancel(&lifecyclev1.TaskCancelHint{
				NodeId: r.NodeID, Task: &nodev1.TaskRef{TaskId: r.TaskID, Attempt: r.Attempt}, Epoch: r.Epoch, Reason: reason,
			})
		}
	}
}

func (s *Server) cancel(ctx context.Context, tx pgx.Tx, r task.Row, reason string) (task.Row, string, error) {
	if task.Terminal(r.State) {
		return task.Row{}, "", fault.New(commonv1.Reason_REASON_TASK_FINISHED, "the task has ended as "+names.Of(r.State))
	}
	state := r.State
	if state == commonv1.TaskState_TASK_STATE_QUEUED {
		state = commonv1.TaskState_TASK_STATE_CANCELLED // no agent has it
	}
	return s.change(ctx, tx, r, state, setCancelled, reason)
}

func (s *Server) requeue(ctx context.Context, tx pgx.Tx, r task.Row, reason string) (task.Row, string, error) {
	var unmet []string
	if r.State != commonv1.TaskState_TASK_STATE_OUTCOME_UNKNOWN && r.State != commonv1.TaskState_TASK_STATE_EXPIRED {
		unmet = append(unmet, "the task is "+names.Of(r.State)+", not outcome_unknown or expired")
	}
	if !task.Requeueable(r.Type) {
		unmet = append(unmet, "what a task of type "+r.Type+
			" carried went with its end: the operation that wanted it queues it anew")
	}
	if len(unmet) > 0 {
		return task.Row{}, "", fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "this task cannot be queued again",
			fault.Unmet(unmet...))
	}
	return s.change(ctx, tx, r, commonv1.TaskState_TASK_STATE_QUEUED, setQueued, reason)
}

func (s *Server) closeUnknown(ctx context.Context, tx pgx.Tx, r task.Row, reason string) (task.Row, string, error) {
	if r.State != commonv1.TaskState_TASK_STATE_OUTCOME_UNKNOWN {
		return task.Row{}, "", fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
			"only a task whose outcome is unknown is closed by a person's judgement",
			fault.Unmet("the task is "+names.Of(r.State)+", not outcome_unknown"))
	}
	return s.change(ctx, tx, r, commonv1.TaskState_TASK_STATE_FAILED, setError, reason)
}

// change moves a locked task, appends its event, and wakes its run if the task ended. more are the arguments that the
// setting takes after the detail.
func (s *Server) change(
	ctx context.Context, tx pgx.Tx, r task.Row, state commonv1.TaskState, set setting, detail string, more ...any,
) (task.Row, string, error) {
	args := append([]any{r.TaskID, names.Of(state), names.Of(r.State), task.Clean(detail, 1024)}, more...)
	moved, err := task.One(ctx, tx, changeTask.For(set), args...)
	if err != nil {
		return task.Row{}, "", fmt.Errorf("change task %s: %w", r.TaskID, err)
	}
	e := moved.Event(r.WithLease(moved.Transition(state, detail))...)
	e.Unnamed = false
	pos, err := events.Append(ctx, tx, e)
	if err != nil {
		return task.Row{}, "", fmt.Errorf("report task: %w", err)
	}
	if task.Terminal(state) && r.RunID != "" {
		if err := s.deps.Wake(ctx, tx, r.RunID); err != nil {
			return task.Row{}, "", fmt.Errorf("wake run: %w", err)
		}
	}
	return moved, pos, nil
}
