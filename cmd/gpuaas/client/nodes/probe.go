package nodes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

func probeCommand(p *kit.Program) *cobra.Command {
	var (
		timeout time.Duration
		key     string
	)
	cmd := &cobra.Command{
		Use: "probe NODE", Short: "Send a typed no-op through the node's stream and print each state with its time",
		Example: "  gpuaas nodes probe node-1 --timeout 10s", Args: kit.Args("NODE"),
		ValidArgsFunction: kit.OnlyFirst(p.CompleteNodes),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			answer, err := s.Command.ProbeNode(ctx, &readmodelv1.ProbeNodeRequest{Node: args[0], IdempotencyKey: key})
			if err != nil {
				return err
			}
			return followTask(ctx, s, answer.GetTask(), answer.GetPos(), timeout)
		}),
	}
	cmd.Flags().DurationVar(&timeout, "timeout", 30*time.Second,
		"give up waiting after this long (exit 6); the task goes on; 0 waits without end")
	cmd.Flags().StringVar(&key, "idempotency-key", "", "the same key answers the same task")
	return cmd
}

// followTask prints the transitions of a task as they come, and the task when it has ended.
func followTask(ctx context.Context, s *kit.Session, task *lifecyclev1.Task, pos string, timeout time.Duration) error {
	shown := 0
	last, err := awaitTask(ctx, s, task, pos, timeout, func(t *readmodelv1.Task) error {
		for ; shown < len(t.GetTransitions()); shown++ {
			if s.Structured() || s.Format == output.FormatName {
				continue
			}
			if err := s.Line(human.Clean(transitionText(t.GetTransitions(), t.GetTransitions()[shown]))); err != nil {
				return err
			}
		}
		return nil
	})
	if s.Structured() || s.Format == output.FormatName {
		if perr := output.One(s.Printer, TaskView, last); perr != nil {
			return perr
		}
	}
	return taskOutcome(last, timeout, err)
}

// reloadWithin bounds the request that reads a task after a wait that took too long.
const reloadWithin = 5 * time.Second

// awaitTask waits until a task has ended, and returns it as it was seen last. Each state that is seen is passed to
// changed; nil: to none. When the time is over it reads the task once more, since the watch may be behind.
func awaitTask(ctx context.Context, s *kit.Session, task *lifecyclev1.Task, pos string, timeout time.Duration,
	changed func(*readmodelv1.Task) error,
) (*readmodelv1.Task, error) {
	all := ctx
	ctx, cancel := kit.Within(ctx, timeout)
	defer cancel()
	last := taskOf(task)
	each := func(item *readmodelv1.WatchItem) (bool, error) {
		t := item.GetTask()
		if t.GetTaskId() != task.GetTaskId() {
			return false, nil
		}
		last = t
		if changed != nil {
			if err := changed(t); err != nil {
				return false, err
			}
		}
		return ended(t.GetState()), nil
	}
	poll := func(ctx context.Context) ([]*readmodelv1.WatchItem, error) {
		got, err := s.Query.GetTask(ctx, &readmodelv1.GetTaskRequest{TaskId: task.GetTaskId(), MinPos: pos})
		return []*readmodelv1.WatchItem{{Object: &readmodelv1.WatchItem_Task{Task: got.GetTask()}}}, err
	}
	err := s.Follow(ctx, &readmodelv1.WatchRequest{
		Topics: []readmodelv1.Topic{readmodelv1.Topic_TOPIC_TASKS}, Node: task.GetNodeId(), MinPos: pos,
	}, poll, each)
	if !errors.Is(err, kit.ErrWaited) {
		return last, err
	}
	reload, end := context.WithTimeout(all, reloadWithin)
	defer end()
	if items, perr := poll(reload); perr == nil {
		if over, cerr := each(items[0]); over || cerr != nil {
			return last, cerr
		}
	} else if all.Err() != nil {
		return last, fmt.Errorf("read the task once more: %w", all.Err())
	}
	return last, err
}

// taskOutcome returns the error for a task that was waited for with err: it has not ended in time, or has not
// succeeded.
func taskOutcome(last *readmodelv1.Task, timeout time.Duration, err error) error {
	switch {
	case errors.Is(err, kit.ErrWaited):
		remedy := "look at it later: gpuaas tasks get " + last.GetTaskId()
		if last.GetState() == commonv1.TaskState_TASK_STATE_QUEUED {
			remedy = "see why its node takes no work: gpuaas nodes get " + last.GetNodeId() + "; " + remedy
		}
		return &exit.Error{
			Code: exit.CodeTimeout, Reason: commonv1.Reason_REASON_DEADLINE_EXCEEDED,
			Message: fmt.Sprintf("task %s is %s after %s", last.GetTaskId(), human.Enum(last.GetState()), timeout),
			Remedy:  remedy,
		}
	case err != nil:
		return err
	case last.GetState() != commonv1.TaskState_TASK_STATE_SUCCEEDED:
		return &exit.Error{
			Code: exit.CodeError, Reason: cmp.Or(last.GetReason(), commonv1.Reason_REASON_INTERNAL),
			Message: fmt.Sprintf("task %s ended %s: %s", last.GetTaskId(), human.Enum(last.GetState()), last.GetError()),
		}
	}
	return nil
}
