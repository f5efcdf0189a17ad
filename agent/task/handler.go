package task

import (
	"context"
	"errors"

	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/envelope"
)

// Task is a verified task with the fields of the offer around it.
type Task struct {
	envelope.Task
	Kind          commonv1.TaskType
	CorrelationID string
	WorkflowID    string
	// Resumed is set if the task had started before the agent did: what it does now may come long after its window.
	Resumed bool
}

// Ref returns the attempt's reference for the wire.
func (t *Task) Ref() *nodev1.TaskRef { return &nodev1.TaskRef{TaskId: t.TaskID, Attempt: t.Attempt} }

// Progress reports a handler's progress. It never blocks; an update that the session cannot take is dropped.
type Progress func(note string, done, total int32)

// Handler does tasks of one type. An error that is a fault gives the result its reason; any other is internal. A
// handler returns soon after its context ends. Handlers run concurrently.
type Handler interface {
	Run(ctx context.Context, t *Task, p Progress) (proto.Message, error)
}

// Observer is a handler that can find out, after a restart of the agent, what became of a task that had started: it
// adopts the effect that it finds, or finishes it. ErrUnknown means that it cannot find out. A cancel of the task does
// not end the context of Observe at once: see Config.ObserveFor.
type Observer interface {
	Observe(ctx context.Context, t *Task, p Progress) (proto.Message, error)
}

// Idempotent marks a handler that may simply run again.
type Idempotent interface {
	Idempotent() bool
}

// ErrUnknown is returned by an Observer that cannot determine the effect. The result is outcome_unknown, and the
// Observe of the saga's step decides.
var ErrUnknown = errors.New("what became of the task cannot be known")

// Sender sends an executor's reports over a session. It must not block: it queues a message, or returns an error, and
// then the executor sends again with the next session, or when the resend interval is over.
type Sender interface {
	Delivered(refs []*nodev1.TaskRef) error
	// Redelivered reports tasks from before the session as delivered, with their envelopes.
	Redelivered(msg *nodev1.TaskDelivered) error
	Started(msg *nodev1.TaskStarted) error
	// Flush sends at once the deliveries and starts that wait in the session for their results.
	Flush()
	Progress(msg *nodev1.TaskProgress) error
	Result(msg *nodev1.TaskResult) error
}

// HandlerFunc is a Handler without state.
type HandlerFunc func(ctx context.Context, t *Task, p Progress) (proto.Message, error)

// Run calls f.
func (f HandlerFunc) Run(ctx context.Context, t *Task, p Progress) (proto.Message, error) {
	return f(ctx, t, p)
}

// again is a handler that may run again after a restart: its effect is the same the second time.
type again struct{ HandlerFunc }

func (again) Idempotent() bool { return true }
