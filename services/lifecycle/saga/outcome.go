package saga

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
)

// Causes with which a step's context ends.
var (
	// ErrCancelRequested says that someone cancelled the run.
	ErrCancelRequested = errors.New("the run is being cancelled")
	// ErrFenced says that this driver no longer holds the lease, or cannot know that it does. What it does now is refused.
	ErrFenced = errors.New("this driver lost its lease on the run")
	// ErrBudget says that the attempt, or the run, is past its deadline.
	ErrBudget = errors.New("the attempt is past its deadline")
	// ErrPaused says that rollback mode is set: the run stands still until it is accepted, and no attempt is counted.
	ErrPaused = errors.New("rollback mode is set: operations stand still until it is accepted")
	// ErrShutdown says that this driver stops; another goes on with the run.
	ErrShutdown = errors.New("the driver is shutting down")
)

// TxFunc writes a step's own rows in the transaction that ends or parks its attempt. The lease is confirmed before it is called. It may run
// more than once (a serialization failure), so it has no effect outside tx.
type TxFunc func(ctx context.Context, tx pgx.Tx) error

type outcomeKind int

const (
	outcomeNone outcomeKind = iota
	outcomeDone
	outcomeWait
)

// Outcome is how a step's function ended if not with an error.
type Outcome struct {
	kind   outcomeKind
	output any
	rows   writes
	wait   WaitFor
}

// writes are a step's own rows: before locks what comes before a run in the order of locks, and rows writes.
type writes struct{ before, rows []TxFunc }

func (w writes) empty() bool { return len(w.rows) == 0 }

// After returns the outcome with locks that its rows need and that come before the run's in the order of locks: those
// of gates and tasks. lock is called before the run is locked and the lease confirmed.
func (o Outcome) After(lock TxFunc) Outcome {
	o.rows.before = append(slices.Clip(o.rows.before), lock)
	return o
}

// Done ends the attempt as succeeded. output (marshalled as JSON, nil for none) is what later steps read; rows are written with the end.
func Done(output any, rows ...TxFunc) Outcome {
	return Outcome{kind: outcomeDone, output: output, rows: writes{rows: rows}}
}

// WaitFor says what a parked attempt waits for.
type WaitFor struct {
	// For is how long to wait before the step looks again, from now by the database's clock.
	For time.Duration
	// Why is shown while it waits. It is never empty.
	Why string
	// WakeOnSignal lets Wake end the wait early. A signal that came since this attempt's function was called ends it at once.
	WakeOnSignal bool
	// Meanwhile is shown with the attempt while it waits, until a later wait brings another or the attempt ends. It ends nothing. May be nil.
	Meanwhile *StepError
}

// Wait parks the attempt and gives the worker free; the same function is called again for the same attempt. rows are written with the park.
func Wait(w WaitFor, rows ...TxFunc) Outcome {
	return Outcome{kind: outcomeWait, wait: w, rows: writes{rows: rows}}
}

// StepError is a failure with its owner.
type StepError struct {
	Layer     commonv1.OwnerLayer
	Reason    commonv1.Reason
	Public    string // one sentence, shown to people
	Retryable bool
	Final     bool          // ends even an undo, which is tried again otherwise
	After     time.Duration // not before; zero: the step's policy
	// LastOutput is the end of what a tenant's workload wrote, where its failure is this one. It is for people of the tenant and operators alone.
	LastOutput string
	cause      error
}

// Error is the text for logs, with the cause.
func (e *StepError) Error() string {
	text := names.Of(e.Reason) + ": " + e.Public
	if e.cause != nil {
		text += ": " + e.cause.Error()
	}
	return text
}

// causeLimit bounds, in characters, what is kept of a cause.
const causeLimit = 600

// Cause is what lies under the failure, for operators: one line without secrets, bounded. It is empty if nothing does.
func (e *StepError) Cause() string {
	if e == nil || e.cause == nil {
		return ""
	}
	text := []rune(strings.Join(strings.Fields(obs.Redact(e.cause.Error())), " "))
	if len(text) > causeLimit {
		text = append(text[:causeLimit-1], '…')
	}
	return string(text)
}

// lastOutput returns what is kept of the workload's output; empty without a failure.
func (e *StepError) lastOutput() string {
	if e == nil {
		return ""
	}
	return e.LastOutput
}

// Unwrap returns the cause.
func (e *StepError) Unwrap() error { return e.cause }

// Fail makes an error that no further attempt can mend: the step fails for good.
func Fail(layer commonv1.OwnerLayer, reason commonv1.Reason, public string, cause error) error {
	return &StepError{Layer: layer, Reason: reason, Public: public, cause: cause}
}

// GiveUp makes an error that ends an undo too: it is past the time in which it was worth another try.
func GiveUp(layer commonv1.OwnerLayer, reason commonv1.Reason, public string, cause error) error {
	return &StepError{Layer: layer, Reason: reason, Public: public, Final: true, cause: cause}
}

// Retry makes an error after which the step is tried again, within its policy.
func Retry(layer commonv1.OwnerLayer, reason commonv1.Reason, public string, cause error) error {
	return &StepError{Layer: layer, Reason: reason, Public: public, Retryable: true, cause: cause}
}

// stepErrorOf classifies what a step returned. A fault of a peer is tried again iff its action is to wait; an error without a class is
// tried again, and only its kind is shown.
func stepErrorOf(step *Step, err error) *StepError {
	if e, ok := errors.AsType[*StepError](err); ok {
		out := *e
		if out.Layer == commonv1.OwnerLayer_OWNER_LAYER_UNSPECIFIED {
			out.Layer = step.Layer
		}
		if out.Public == "" {
			out.Public = fault.RowOf(out.Reason).Public
		}
		return &out
	}
	if f, ok := fault.As(err); ok {
		return &StepError{
			Layer: step.Layer, Reason: f.Reason, Public: f.Public, After: f.RetryAfter, cause: err,
			Retryable: fault.ActionOf(f) == commonv1.Action_ACTION_WAIT,
		}
	}
	return &StepError{
		Layer: step.Layer, Reason: commonv1.Reason_REASON_INTERNAL, Retryable: true, cause: err,
		Public: fmt.Sprintf("the step %q failed inside", step.Name),
	}
}

// Waits says whether the outcome parks the attempt.
func (o Outcome) Waits() bool { return o.kind == outcomeWait }

// Why says what an outcome that parks the attempt waits for.
func (o Outcome) Why() string { return o.wait.Why }

// Interrupted reports whether err ends a step without a verdict on it: the lease is lost, or the run stands still.
func Interrupted(err error) bool { return errors.Is(err, ErrFenced) || errors.Is(err, ErrPaused) }

// paused reports whether a step ended because rollback mode is set, by what it saw itself or by what a peer refused.
func paused(err error) bool {
	return errors.Is(err, ErrPaused) || fault.Has(err, commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK)
}
