package task

import (
	"context"
	"log/slog"
	"time"
)

// park keeps a task whose handler has not begun, to be started again. The caller gives its place back.
func (e *Executor) park(ctx context.Context, j *job, err error) {
	e.mu.Lock()
	j.cancel = nil
	e.parked = append(e.parked, j)
	e.mu.Unlock()
	e.notStored(ctx, j, "start of a task is not stored yet", err)
}

// forget drops a task that is not in the ledger, or is finished there: nothing is left to do for it.
func (e *Executor) forget(ctx context.Context, j *job, err error) {
	e.mu.Lock()
	delete(e.jobs, j.key)
	e.mu.Unlock()
	e.deps.Logger.ErrorContext(ctx, "task is not in the ledger as it should be", slog.String("task_id", j.task.TaskID),
		slog.Any("error", err))
}

// retry writes to the ledger again: the results first, as they make room. It stops at the first result that cannot be
// stored again, and puts that one last.
func (e *Executor) retry(ctx context.Context) {
	e.mu.Lock()
	for _, j := range e.parked {
		e.waiting[j.task.Kind] = append(e.waiting[j.task.Kind], j)
	}
	e.parked = nil
	n := len(e.unkept)
	e.mu.Unlock()
	for range n {
		e.mu.Lock()
		next := e.unkept[0] // only this loop takes, so n of them are there
		e.unkept = e.unkept[1:]
		e.mu.Unlock()
		if !e.finish(ctx, next.job, next.msg) {
			return
		}
	}
}

// notStored logs at most one failure of the ledger per logEvery, since on a full disk every task fails every second.
func (e *Executor) notStored(ctx context.Context, j *job, what string, err error) {
	now := time.Now()
	e.mu.Lock()
	quiet := now.Sub(e.logged) < logEvery
	if !quiet {
		e.logged = now
	}
	waiting := len(e.parked) + len(e.unkept)
	e.mu.Unlock()
	if quiet {
		return
	}
	//nolint:sloglint // the callers' messages are constants
	e.deps.Logger.ErrorContext(ctx, what, slog.String("task_id", j.task.TaskID), slog.Int("not_stored", waiting),
		slog.Any("error", err))
}
