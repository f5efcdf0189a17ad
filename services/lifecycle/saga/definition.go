package saga

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// Class classifies a step by the effects that it leaves behind.
type Class int

// The classes. A Pure step makes nothing. An Idempotent step may be repeated at will. A Create step makes a resource
// outside the database; it writes a claim with a deterministic name before it calls out, and its Observe is called
// before its Do in every later attempt and in every later round, so that the resource is not made twice.
const (
	Pure Class = iota + 1
	Idempotent
	Create
)

// StepFunc does or undoes a step. It may be called again for the same attempt (after a Wait) and for a later attempt of
// the same step, so it checks what exists before it acts; Env.Stage is the stage that it was in. It returns soon after
// its context ends; the cause of the context is the reason (ErrCancelRequested, ErrFenced, ErrBudget, ErrShutdown).
type StepFunc func(ctx context.Context, env *Env) (Outcome, error)

// ObserveFunc queries the resource itself and returns whether the step's work is there.
type ObserveFunc func(ctx context.Context, env *Env) (Observation, error)

// Presence is the result of an observation.
type Presence int

// What Observe can find. Unknown means that the resource could not be queried.
const (
	Unknown Presence = iota
	Absent
	Partial
	Present
)

// Observation is the result of Observe. Output replaces Do's output if the work is Present.
type Observation struct {
	Presence Presence
	Output   any
	Why      string
	// Rows writes the step's own rows in the transaction that ends the attempt, if Present ends it.
	Rows TxFunc
}

// Step is one step of a definition.
type Step struct {
	Name    string
	Class   Class
	Do      StepFunc
	Undo    StepFunc    // nil: nothing to undo
	Observe ObserveFunc // nil only for Pure
	// Kinds are the claim kinds that this step makes or releases. Compensation begins at the last step with a live claim
	// of one of its kinds.
	Kinds []string
	// Budget bounds one attempt from its start, waits included; past it the attempt fails as deadline_of_step_exceeded.
	Budget time.Duration
	// StallAfter is how long an attempt may show no progress before it is flagged. The flag stops nothing.
	StallAfter time.Duration
	Retry      RetryPolicy
	UndoRetry  RetryPolicy
	// Retain ends the run as failed with all claims kept when this step fails for good: the next run adopts them.
	Retain bool
	// Layer is the owner shown with a failure that has no owner of its own.
	Layer commonv1.OwnerLayer
}

// WorkspaceStates are the states that a run of a definition gives its workspace. Stuck and cancelling are the same for
// all.
type WorkspaceStates struct {
	Running   commonv1.WorkspaceState // while the run lives
	Succeeded commonv1.WorkspaceState
	Failed    commonv1.WorkspaceState
}

// Definition is a named, versioned list of steps. A run is pinned to the version it started with.
type Definition struct {
	Name    string
	Version int
	Steps   []Step
	States  WorkspaceStates
	// Deadline ends the forward phase of a run, from its start; zero means one hour.
	Deadline time.Duration
	// StallAfter flags the whole run; zero means 15 minutes.
	StallAfter time.Duration
	// Sticks makes the run `stuck` when a step fails for good, instead of compensating: a teardown cannot be undone.
	Sticks bool
	// Uncancellable refuses Cancel.
	Uncancellable bool
	// OnStuck is called in the transaction that makes a run stuck, and writes what follows for the rows of the workspace,
	// such as its allocation. May be nil.
	OnStuck func(ctx context.Context, tx pgx.Tx, workspaceID string, why *StepError) error
	// BeforeStuck locks the rows that OnStuck is going to change and that come before runs in the order of locks. It is
	// called before the run is locked. May be nil.
	BeforeStuck func(ctx context.Context, tx pgx.Tx, workspaceID string) error
}

const (
	defaultBudget     = 30 * time.Minute
	defaultStall      = 5 * time.Minute
	defaultRunStall   = 15 * time.Minute
	defaultDeadline   = time.Hour
	defaultDoAttempts = 3
	defaultUndoTries  = 8
	defaultUndoWithin = 10 * time.Minute
	defaultFirst      = time.Second
	defaultMaxWait    = 30 * time.Second
)

// normalized returns a definition with defaults filled in, or every problem it has.
func normalized(d Definition) (Definition, error) {
	var problems []error
	add := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	if d.Name == "" || d.Version < 1 {
		add("definition %q needs a name and a version from 1", d.Name)
	}
	if len(d.Steps) == 0 {
		add("definition %q has no steps", d.Name)
	}
	if d.States.Running == 0 || d.States.Succeeded == 0 || d.States.Failed == 0 {
		add("definition %q leaves a workspace state open", d.Name)
	}
	d.Deadline = orDuration(d.Deadline, defaultDeadline)
	d.StallAfter = orDuration(d.StallAfter, defaultRunStall)
	d.Steps = slices.Clone(d.Steps)
	seen := map[string]bool{}
	for i := range d.Steps {
		s := &d.Steps[i]
		switch {
		case s.Name == "" || s.Do == nil:
			add("step %d of %q needs a name and a Do", i, d.Name)
		case seen[s.Name]:
			add("step %q of %q appears twice", s.Name, d.Name)
		case s.Class < Pure || s.Class > Create:
			add("step %q of %q has no class", s.Name, d.Name)
		case s.Class != Pure && s.Observe == nil:
			add("step %q of %q needs an Observe", s.Name, d.Name)
		case s.Class == Create && s.Undo == nil:
			add("step %q of %q creates and cannot be undone", s.Name, d.Name)
		}
		seen[s.Name] = true
		s.Budget = orDuration(s.Budget, defaultBudget)
		s.StallAfter = orDuration(s.StallAfter, defaultStall)
		s.Retry = s.Retry.orDefault(RetryPolicy{Attempts: defaultDoAttempts, First: defaultFirst, Max: defaultMaxWait})
		s.UndoRetry = s.UndoRetry.orDefault(RetryPolicy{
			Attempts: defaultUndoTries, Within: defaultUndoWithin,
			First: defaultFirst, Max: 2 * time.Minute,
		})
	}
	return d, errors.Join(problems...)
}

func orDuration(d, fallback time.Duration) time.Duration {
	if d == 0 {
		return fallback
	}
	return d
}

func (d *Definition) stepNames() []string {
	names := make([]string, len(d.Steps))
	for i := range d.Steps {
		names[i] = d.Steps[i].Name
	}
	return names
}

// Undoable returns the last step at or before i that has an Undo, or -1.
func (d *Definition) Undoable(i int) int {
	for ; i >= 0; i-- {
		if d.Steps[i].Undo != nil {
			return i
		}
	}
	return -1
}

// Open returns the attempt that is open in the row of a run of this definition, with its deadline.
func (d *Definition) Open(r *runs.Run) runs.Attempt {
	a := runs.Open(r)
	deadline := a.StartedAt.Add(d.Steps[r.Step].Budget)
	a.DeadlineAt = &deadline
	return a
}
