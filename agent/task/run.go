package task

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/mesh/agent/ledger"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
)

// resume takes up the tasks that are in the ledger without a result. None is begun, and no started one is observed or
// run again, before the control plane has listed what may run on this node: after a boot, or on a directory that was
// restored from a copy, their epoch may be over, and its workloads may run on another machine.
func (e *Executor) resume(ctx context.Context) {
	for _, entry := range e.deps.Ledger.Unfinished() {
		j, err := e.revive(&entry)
		started := entry.State == ledger.StateStarted
		if fault.Has(err, commonv1.Reason_REASON_TASK_WRONG_NODE) {
			e.abandon(ctx, &entry, err)
			continue
		}
		if err != nil {
			// The outcome of a task that was begun under a key that is not trusted now is unknown.
			if started {
				err = fmt.Errorf("%w: %w", ErrUnknown, err)
			}
			e.finish(ctx, j, e.resultOf(j, nil, err))
			continue
		}
		e.mu.Lock()
		if started {
			j.started, j.observe, j.task.Resumed = entry.StartedAt, true, true
		}
		e.jobs[j.key] = j
		e.waiting[j.task.Kind] = append(e.waiting[j.task.Kind], j)
		e.mu.Unlock()
	}
	e.dispatch(ctx)
}

// revive returns the job of an entry, with an error if it must not be begun: the keys may have been rotated since it
// was stored, or this agent may have no handler for its type. The reason task_wrong_node means that the task is another
// node's: see abandon.
func (e *Executor) revive(entry *ledger.Entry) (*job, error) {
	j := &job{key: entry.Key, task: Task{
		Task:          envelope.Task{TaskID: entry.Key.TaskID, Attempt: entry.Key.Attempt, WorkspaceID: entry.WorkspaceID},
		Kind:          entry.Type,
		CorrelationID: entry.CorrelationID,
		WorkflowID:    entry.WorkflowID,
	}}
	// The node is checked before the signature: this node need not trust the keys of another node's mesh, and must not run
	// its task in any case.
	if node, ok := envelope.ClaimedNode(entry.Envelope); ok && node != e.cfg.NodeID {
		return j, fault.New(commonv1.Reason_REASON_TASK_WRONG_NODE, "",
			fault.Cause(fmt.Errorf("it is a task of node %s", node)))
	}
	signed, err := envelope.Verify(e.deps.Verifiers(), entry.Envelope, entry.Signature, entry.KeyID)
	if err == nil && e.deps.Handlers[entry.Type] == nil {
		err = fault.New(commonv1.Reason_REASON_TASK_TYPE_UNSUPPORTED, "")
	}
	if err != nil {
		return j, err
	}
	j.task.Task = signed
	return j, nil
}

// abandon sets aside a task that was signed for another node, from which this one was imaged, ledger included. It is
// neither run nor reported: its own node does both.
func (e *Executor) abandon(ctx context.Context, entry *ledger.Entry, err error) {
	e.evidence(ctx, "task of another node was in the ledger", entry.Key, entry.Envelope, entry.KeyID, err)
	if err := e.deps.Ledger.Abandon(context.WithoutCancel(ctx), entry.Key); err != nil {
		// The next restart tries again.
		e.deps.Logger.ErrorContext(ctx, "task of another node was not set aside", slog.String("task_id", entry.Key.TaskID),
			slog.Any("error", err))
	}
}

// dispatch starts the waiting tasks for which there is a place and whose operation is the running one of its workspace
// or may become it, and ends those that were overtaken. It does nothing until the server's time is known and the
// control plane has listed what may run here. Tasks that had started before a restart come first, over the limit of
// their type if need be: they wait only for another operation of their workspace that had started too.
func (e *Executor) dispatch(ctx context.Context) {
	if _, ok := e.deps.ServerNow(); !ok || ctx.Err() != nil || e.deps.Listed != nil && !e.deps.Listed() {
		return
	}
	var ready, overtaken []*job
	e.mu.Lock()
	for _, observe := range []bool{true, false} {
		for kind, queue := range e.waiting {
			still := make([]*job, 0, len(queue))
			for _, j := range queue {
				switch {
				case j.observe != observe:
					still = append(still, j)
				case e.overtakenLocked(&j.task):
					overtaken = append(overtaken, j)
				case e.enterLocked(&j.task, observe):
					ready = append(ready, j)
					if observe {
						e.startedLocked(&j.task)
					}
				default:
					still = append(still, j)
				}
			}
			e.waiting[kind] = still
		}
	}
	e.mu.Unlock()
	for _, j := range ready {
		e.launch(ctx, j)
	}
	for _, j := range overtaken {
		e.supersede(ctx, j)
	}
}

// launch runs j in a goroutine of its own, in a place that is reserved for it.
func (e *Executor) launch(ctx context.Context, j *job) {
	jobCtx, cancel := context.WithCancelCause(ctx)
	e.mu.Lock()
	j.cancel = cancel
	if j.dropped != "" {
		cancel(errCancelled)
	}
	e.jobs[j.key] = j
	e.handlers.Add(1)
	e.mu.Unlock()
	go func() {
		defer e.handlers.Done()
		defer cancel(nil)
		e.work(ctx, jobCtx, j)
		e.leave(&j.task)
		e.dispatch(ctx)
	}()
}

// work runs one task to its result, unless its start cannot be stored (then the task is parked) or the agent stops. The
// handler runs under jobCtx, which is the task's, a child of ctx, and ends when the task is cancelled. Its result is
// stored under ctx, which is the executor's.
func (e *Executor) work(ctx, jobCtx context.Context, j *job) {
	if j.started.IsZero() {
		if !e.begin(ctx, j) {
			return
		}
		e.dispatch(ctx) // ends the tasks that it has overtaken
	}
	// A later epoch may have been delivered since the task was marked, and a task that had started before a restart may
	// have been overtaken before it.
	late, err := e.superseded(&j.task)
	if err != nil {
		e.park(ctx, j, err)
		return
	}
	if late {
		e.supersede(ctx, j)
		return
	}
	e.sendStarted(j)
	runCtx, cancel := e.bound(ctx, jobCtx, j)
	defer cancel()
	out, err := e.call(runCtx, j)
	if err != nil && ctx.Err() != nil {
		// The agent stops, not the task: it keeps its mark, and the next Run observes it.
		return
	}
	if cause := context.Cause(runCtx); err != nil && cause != nil {
		err = fmt.Errorf("%w: %w", cause, err)
	}
	e.finish(ctx, j, e.resultOf(j, out, err))
}

// bound returns the context for the handler of j, which ends with the agent, with jobCtx, and after MaxRun. A cancel of
// the task does not end an Observe at once, since what the task left still has to be found out: the Observe has
// ObserveFor from the cancel on, because later operations of the workspace wait for it. That is why bound is given ctx
// too, the executor's, of which jobCtx is a child.
func (e *Executor) bound(ctx, jobCtx context.Context, j *job) (context.Context, context.CancelFunc) {
	if _, can := e.deps.Handlers[j.task.Kind].(Observer); !can || !j.observe {
		return context.WithTimeoutCause(jobCtx, e.cfg.MaxRun, errMaxRun)
	}
	ctx, end := context.WithTimeoutCause(ctx, e.cfg.MaxRun, errMaxRun)
	ctx, give := context.WithCancelCause(ctx)
	stop := context.AfterFunc(jobCtx, func() {
		late := time.AfterFunc(e.cfg.ObserveFor, func() { give(errNotObserved) })
		context.AfterFunc(ctx, func() { late.Stop() })
	})
	return ctx, func() {
		stop()
		give(nil)
		end()
	}
}

// begin checks once more that j may start, marks it as started, and returns whether its handler is to run.
func (e *Executor) begin(ctx context.Context, j *job) bool {
	e.mu.Lock()
	dropped := j.dropped
	e.mu.Unlock()
	if dropped != "" {
		e.finish(ctx, j, e.resultOf(j, nil, errCancelled))
		return false
	}
	if err := e.window(&j.task); err != nil {
		e.finish(ctx, j, e.resultOf(j, nil, err))
		return false
	}
	entry, err := e.deps.Ledger.Start(context.WithoutCancel(ctx), j.key)
	if errors.Is(err, ledger.ErrNotDelivered) {
		entry, err = e.marked(j, err)
	}
	switch {
	case err == nil:
		e.mu.Lock()
		j.started = entry.StartedAt
		e.startedLocked(&j.task)
		e.mu.Unlock()
		return true
	case errors.Is(err, ledger.ErrSuperseded):
		e.supersede(ctx, j)
	case errors.Is(err, ledger.ErrUnknown), errors.Is(err, ledger.ErrNotDelivered):
		e.forget(ctx, j, err)
	default:
		e.park(ctx, j, err)
	}
	return false
}

// marked returns the entry of a task whose start was stored although the ledger returned an error. Its handler may run:
// only this executor starts tasks, and it has not begun this one.
func (e *Executor) marked(j *job, refused error) (ledger.Entry, error) {
	entry, found, err := e.deps.Ledger.Get(j.key)
	if err != nil {
		return ledger.Entry{}, err
	}
	if !found || entry.State != ledger.StateStarted {
		return ledger.Entry{}, refused
	}
	return entry, nil
}

// call runs the handler, or its Observe, and returns a panic as an error.
//
//nolint:nonamedreturns // a recovered panic becomes the error
func (e *Executor) call(ctx context.Context, j *job) (out proto.Message, err error) {
	defer func() {
		if r := recover(); r != nil {
			e.stats.panics.Add(1)
			e.deps.Logger.ErrorContext(ctx, "task handler panicked", slog.String("task_id", j.task.TaskID),
				slog.String("type", j.task.Type),
				slog.Any("panic", r), slog.String("stack", string(debug.Stack())))
			out, err = nil, fault.New(commonv1.Reason_REASON_INTERNAL, fmt.Sprintf("the handler of %s panicked", j.task.Type))
		}
	}()
	if err := failpoint.Hit("agent.run.before_handler"); err != nil {
		return nil, err
	}
	h := e.deps.Handlers[j.task.Kind]
	if !j.observe {
		return h.Run(ctx, &j.task, e.progress(j))
	}
	if o, ok := h.(Observer); ok {
		return o.Observe(ctx, &j.task, e.progress(j))
	}
	if e.mayRepeat(j.task.Kind) {
		return h.Run(ctx, &j.task, e.progress(j))
	}
	return nil, ErrUnknown
}

func (e *Executor) progress(j *job) Progress {
	return func(note string, done, total int32) {
		msg := &nodev1.TaskProgress{Task: j.task.Ref(), Note: cut(clean(note, maxNote), maxNote), Done: done, Total: total}
		e.send(func(s Sender) error { return s.Progress(msg) })
	}
}

// supersede ends a task that a later operation of its workspace has overtaken.
func (e *Executor) supersede(ctx context.Context, j *job) {
	e.finish(ctx, j, superseded(j))
}

// finish stores the result and then sends it. A result that cannot be stored is not sent: it is stored later, or, after
// a restart, the task is observed and its result sent then.
func (e *Executor) finish(ctx context.Context, j *job, msg *nodev1.TaskResult) bool {
	encoded, err := proto.Marshal(msg)
	if err == nil {
		_, err = e.deps.Ledger.Finish(context.WithoutCancel(ctx), j.key, msg.GetState(), encoded)
	}
	if errors.Is(err, ledger.ErrUnknown) {
		e.forget(ctx, j, err)
		return true
	}
	if err != nil {
		e.mu.Lock()
		e.jobs[j.key] = j
		e.unkept = append(e.unkept, unkept{j, msg})
		e.mu.Unlock()
		e.notStored(ctx, j, "result of a task is not stored yet", err)
		return false
	}
	e.mu.Lock()
	delete(e.jobs, j.key)
	e.mu.Unlock()
	e.send(func(s Sender) error {
		if err := s.Result(msg); err != nil {
			return err
		}
		e.mu.Lock()
		defer e.mu.Unlock()
		e.sent[j.key] = time.Now()
		return nil
	})
	return true
}

// cancelTask ends a task that waits, and cancels the context of a running one; see bound for one that is observed.
// A finished task is left alone, and an unknown one ends when it is offered.
func (e *Executor) cancelTask(ctx context.Context, ref *nodev1.TaskRef) {
	key := ledger.Key{TaskID: ref.GetTaskId(), Attempt: ref.GetAttempt()}
	e.mu.Lock()
	j := e.jobs[key]
	if j == nil {
		e.mu.Unlock()
		if _, known, err := e.deps.Ledger.Get(key); err != nil || !known {
			e.prestart.add(key, time.Now())
		}
		return
	}
	if j.cancel != nil {
		if j.started.IsZero() {
			j.dropped = droppedCancel
		}
		cancel := j.cancel
		e.mu.Unlock()
		cancel(errCancelled)
		return
	}
	queue := e.waiting[j.task.Kind]
	for i, w := range queue {
		// a task that had started before a restart may have had its effect, so it is observed and not ended here
		if w == j && !j.observe {
			e.waiting[j.task.Kind] = append(queue[:i:i], queue[i+1:]...)
			j.gone = true
			break
		}
	}
	gone := j.gone
	if !gone {
		j.dropped = droppedCancel
	}
	e.mu.Unlock()
	if gone {
		e.finish(ctx, j, e.resultOf(j, nil, errCancelled))
	}
}

func (j *job) startedMessage() *nodev1.TaskStarted {
	return &nodev1.TaskStarted{Task: j.task.Ref(), StartedAt: timestamppb.New(j.started)}
}
