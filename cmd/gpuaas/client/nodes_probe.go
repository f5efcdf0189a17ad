package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/spf13/cobra"
)

func nodesProbe(p *Program) *cobra.Command {
	var (
		timeout time.Duration
		key     string
	)
	cmd := &cobra.Command{
		Use: "probe NODE", Short: "Send a typed no-op through the node's stream and print each state with its time",
		Example: "  gpuaas nodes probe node-1 --timeout 10s", Args: args("NODE"),
		ValidArgsFunction: onlyFirst(p.completeNodes),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			answer, err := s.command.ProbeNode(ctx, &readmodelv1.ProbeNodeRequest{Node: args[0], IdempotencyKey: key})
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
func followTask(ctx context.Context, s *session, task *lifecyclev1.Task, pos string, timeout time.Duration) error {
	ctx, cancel := within(ctx, timeout)
	defer cancel()
	last, shown := taskOf(task), 0
	each := func(item *readmodelv1.WatchItem) (bool, error) {
		t := item.GetTask()
		if t.GetTaskId() != task.GetTaskId() {
			return false, nil
		}
		last = t
		for ; shown < len(t.GetTransitions()); shown++ {
			if s.structured() || s.format == formatName {
				continue
			}
			if err := s.line(clean(transitionText(t.GetTransitions(), shown, t.GetTransitions()[shown]))); err != nil {
				return false, err
			}
		}
		return ended(t.GetState()), nil
	}
	poll := func(ctx context.Context) ([]*readmodelv1.WatchItem, error) {
		got, err := s.query.GetTask(ctx, &readmodelv1.GetTaskRequest{TaskId: task.GetTaskId(), MinPos: pos})
		return []*readmodelv1.WatchItem{{Object: &readmodelv1.WatchItem_Task{Task: got.GetTask()}}}, err
	}
	err := s.follow(ctx, &readmodelv1.WatchRequest{
		Topics: []readmodelv1.Topic{readmodelv1.Topic_TOPIC_TASKS}, Node: task.GetNodeId(), MinPos: pos,
	}, poll, each)
	if s.structured() || s.format == formatName {
		if perr := one(s.printer, taskView, last); perr != nil {
			return perr
		}
	}
	switch {
	case errors.Is(err, errWaited):
		return &exitError{
			code: ExitTimeout, reason: commonv1.Reason_REASON_DEADLINE_EXCEEDED,
			message: fmt.Sprintf("task %s is %s after %s", task.GetTaskId(), enumText(last.GetState()), timeout),
			remedy:  "look at it later: gpuaas tasks get " + task.GetTaskId(),
		}
	case err != nil:
		return err
	case last.GetState() != commonv1.TaskState_TASK_STATE_SUCCEEDED:
		reason := last.GetReason()
		if reason == commonv1.Reason_REASON_UNSPECIFIED {
			reason = commonv1.Reason_REASON_INTERNAL
		}
		return &exitError{
			code: ExitError, reason: reason,
			message: fmt.Sprintf("task %s ended %s: %s", task.GetTaskId(), enumText(last.GetState()), last.GetError()),
		}
	}
	return nil
}
