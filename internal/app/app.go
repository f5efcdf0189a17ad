// Package app runs the named tasks of a process and stops them in order.
//
// It owns the goroutines at the top of a process: it starts each task, waits for each, and returns the names and errors
// of those that failed. A task has ended only when it returns; a task that returns nil before the shutdown has failed
// too, because a loop that ended without an error would otherwise look like one that works. It never restarts a task by
// itself (Supervise does, for child processes) and never reads configuration.
//
// Guarantees: a panic becomes an error with its stack; the first failure starts the shutdown; phases stop in their
// order, and every task of a phase is asked to stop before any of the next; Run returns when every task has returned,
// or after the grace with an error that names the tasks that did not.
//
//	run ──► first failure or the caller's cancel ──► not-ready ─► drain ─► loops ─► leases ─► pools ──► return
//	                                                 └────────────────── at most Grace ──────────────────┘
package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"
	"strings"
	"time"
)

// DefaultGrace is how long a shutdown may take before Run returns without the tasks that hang.
const DefaultGrace = 30 * time.Second

// ErrShutdown is the cancel cause that tasks see when nothing failed.
var ErrShutdown = errors.New("shutdown")

// ErrHardStop is in Run's error if tasks were still running after the grace.
var ErrHardStop = errors.New("hard stop: tasks did not end in time")

// Phase is the step of a shutdown in which a task is stopped. The zero value is PhaseLoops.
type Phase int

// The phases, in the order of a shutdown.
const (
	phaseUnset    Phase = iota
	PhaseNotReady       // readiness becomes false, for every caller that checks it
	PhaseDrain          // servers and streams: ask peers to use another replica
	PhaseLoops          // sweeps, tickers, consumers
	PhaseLeases         // finish or release what this process holds
	PhasePools          // database pools, the ops server, exporters
)

func (p Phase) String() string {
	switch p {
	case PhaseNotReady:
		return "not_ready"
	case PhaseDrain:
		return "drain"
	case PhaseLeases:
		return "release_leases"
	case PhasePools:
		return "close_pools"
	case phaseUnset, PhaseLoops:
		return "stop_loops"
	default:
		return "unknown"
	}
}

// share returns the part of the grace that a phase may take, in thirtieths, before the next phase starts even though
// tasks of this one still run.
func (p Phase) share() int {
	switch p {
	case PhaseNotReady:
		return 1
	case PhaseDrain:
		return 12
	case PhasePools, PhaseLeases:
		return 5
	case phaseUnset, PhaseLoops:
		return 6
	default:
		return 1
	}
}

// Task is one named part of a process. Run, Stop or both are set.
type Task struct {
	Name  string
	Phase Phase

	// Run blocks until its context ends. Returning before shutdown, nil included, is a failure. Its context is cancelled
	// in the task's phase.
	Run func(ctx context.Context) error

	// Stop is called in the task's phase, before Run's context is cancelled: a drain, a release, a close. Its context is
	// not cancelled by the shutdown; it ends with the phase's share of the grace.
	Stop func(ctx context.Context) error
}

// Group holds the settings with which tasks are run. The zero value of Grace means DefaultGrace.
type Group struct {
	Logger *slog.Logger
	Grace  time.Duration
}

// Run runs the tasks until ctx ends or one of them fails, then stops them in order. It returns nil after a clean
// shutdown that the end of ctx started.
func Run(ctx context.Context, logger *slog.Logger, tasks ...Task) error {
	return Group{Logger: logger}.Run(ctx, tasks...)
}

type running struct {
	Task
	cancel context.CancelCauseFunc
	done   chan struct{}
}

type outcome struct {
	name string
	err  error
}

// Run runs the tasks as the function Run does, with the settings of g.
func (g Group) Run(ctx context.Context, tasks ...Task) error {
	if err := check(tasks); err != nil {
		return err
	}
	if g.Logger == nil {
		g.Logger = slog.New(slog.DiscardHandler)
	}
	if g.Grace <= 0 {
		g.Grace = DefaultGrace
	}
	// Tasks do not see the caller's cancel: the shutdown below decides when each of them stops.
	base := context.WithoutCancel(ctx)
	ended := make(chan outcome, len(tasks))
	started := make([]*running, 0, len(tasks))
	for _, task := range tasks {
		if task.Phase == phaseUnset {
			task.Phase = PhaseLoops
		}
		r := &running{Task: task, done: make(chan struct{})}
		taskCtx, cancel := context.WithCancelCause(base)
		r.cancel = cancel
		started = append(started, r)
		if task.Run == nil {
			close(r.done)
			continue
		}
		go func() {
			defer close(r.done)
			ended <- outcome{name: r.Name, err: Protect(taskCtx, r.Run)}
		}()
	}

	var failures []error
	cause := ErrShutdown
	select {
	case <-ctx.Done():
		if c := context.Cause(ctx); c != nil && !errors.Is(c, context.Canceled) {
			cause = c
		}
		g.Logger.InfoContext(ctx, "shutting down", slog.String("cause", cause.Error()))
	case o := <-ended:
		cause = asFailure(o)
		failures = append(failures, cause)
		g.Logger.ErrorContext(ctx, "task failed, shutting down", slog.String("task", o.name),
			slog.String("error", cause.Error()))
	}
	stopErrs, hung := g.shutdown(base, started, cause)
	failures = append(failures, stopErrs...)
	failures = append(failures, late(ended, cause)...)
	if len(hung) > 0 {
		failures = append(failures, fmt.Errorf("%w: %s", ErrHardStop, strings.Join(hung, ", ")))
	}
	return errors.Join(failures...)
}

// shutdown stops the tasks phase by phase and returns the errors of their Stop hooks and the names of the tasks that
// still run at the end.
func (g Group) shutdown(base context.Context, tasks []*running, cause error) ([]error, []string) {
	hard, cancelHard := context.WithTimeout(base, g.Grace)
	defer cancelHard()
	var failures []error
	for _, phase := range []Phase{PhaseNotReady, PhaseDrain, PhaseLoops, PhaseLeases, PhasePools} {
		var members []*running
		for _, r := range tasks {
			if r.Phase == phase {
				members = append(members, r)
			}
		}
		if len(members) == 0 {
			continue
		}
		begin := time.Now()
		phaseCtx, cancel := context.WithTimeout(hard, g.Grace/30*time.Duration(phase.share()))
		failures = append(failures, stopAll(phaseCtx, members)...)
		for _, r := range members {
			r.cancel(cause)
		}
		for _, r := range members {
			select {
			case <-r.done:
			case <-phaseCtx.Done():
			}
		}
		cancel()
		g.Logger.DebugContext(base, "shutdown phase done", slog.String("phase", phase.String()),
			slog.Duration("took", time.Since(begin)))
	}
	var hung []string
	for _, r := range tasks {
		select {
		case <-r.done:
		case <-hard.Done():
			select {
			case <-r.done:
			default:
				hung = append(hung, r.Name)
			}
		}
	}
	return failures, hung
}

// stopAll calls the Stop hooks of one phase at the same time and waits for them until ctx ends. A hook that ignores its
// context is left running and reported.
func stopAll(ctx context.Context, members []*running) []error {
	results := make(chan outcome, len(members))
	waiting := map[string]bool{}
	for _, r := range members {
		if r.Stop == nil {
			continue
		}
		waiting[r.Name] = true
		go func() { results <- outcome{name: r.Name, err: Protect(ctx, r.Stop)} }()
	}
	var failures []error
	for len(waiting) > 0 {
		select {
		case o := <-results:
			delete(waiting, o.name)
			if o.err != nil {
				failures = append(failures, fmt.Errorf("stop %q: %w", o.name, o.err))
			}
		case <-ctx.Done():
			// Hooks that heed their context return now; they get 100 ms, so that their own error is the one reported.
			grace := time.NewTimer(100 * time.Millisecond)
			for len(waiting) > 0 {
				select {
				case o := <-results:
					delete(waiting, o.name)
					if o.err != nil {
						failures = append(failures, fmt.Errorf("stop %q: %w", o.name, o.err))
					}
					continue
				case <-grace.C:
				}
				for name := range waiting {
					failures = append(failures, fmt.Errorf("stop %q: %w", name, ErrHardStop))
				}
				clear(waiting)
			}
			grace.Stop()
		}
	}
	return failures
}

// late returns the errors that tasks returned after the shutdown began, other than the end of their context.
func late(ended <-chan outcome, cause error) []error {
	var out []error
	for {
		select {
		case o := <-ended:
			if o.err == nil || errors.Is(o.err, context.Canceled) || errors.Is(o.err, ErrShutdown) || errors.Is(o.err, cause) {
				continue
			}
			out = append(out, fmt.Errorf("task %q: %w", o.name, o.err))
		default:
			return out
		}
	}
}

func asFailure(o outcome) error {
	if o.err == nil {
		return fmt.Errorf("task %q ended although it was not asked to", o.name)
	}
	return fmt.Errorf("task %q: %w", o.name, o.err)
}

func check(tasks []Task) error {
	if len(tasks) == 0 {
		return errors.New("run tasks: there are none")
	}
	var names []string
	for _, task := range tasks {
		switch {
		case task.Name == "":
			return errors.New("run tasks: one has no name")
		case slices.Contains(names, task.Name):
			return fmt.Errorf("run tasks: %q twice", task.Name)
		case task.Run == nil && task.Stop == nil:
			return fmt.Errorf("run tasks: %q does nothing", task.Name)
		}
		names = append(names, task.Name)
	}
	return nil
}

// PanicError is a panic of a task as an error.
type PanicError struct {
	Value any
	Stack []byte
}

func (e *PanicError) Error() string {
	return fmt.Sprintf("panic: %v\n%s", e.Value, e.Stack)
}

// Unwrap returns the panic's value if it was an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// Protect calls fn and returns its error, or its panic as a *PanicError.
//
// a deferred recover must set it
func Protect(ctx context.Context, fn func(context.Context) error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &PanicError{Value: v, Stack: debug.Stack()}
		}
	}()
	return fn(ctx)
}
