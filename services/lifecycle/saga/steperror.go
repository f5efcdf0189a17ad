package saga

import (
	"errors"
	"fmt"
	"strings"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
)

// Causes with which a step's context ends.
var (
	// ErrCancelRequested means that the run was cancelled.
	ErrCancelRequested = errors.New("the run is being cancelled")
	// ErrFenced means that this driver no longer has the lease, or cannot know that it has. Its writes are refused.
	ErrFenced = errors.New("this driver lost its lease on the run")
	// ErrBudget means that the attempt, or the run, is past its deadline.
	ErrBudget = errors.New("the attempt is past its deadline")
	// ErrPaused means that rollback mode is set: the run is paused until an operator accepts the rollback, and no attempt
	// is counted.
	ErrPaused = errors.New("rollback mode is set: operations stand still until it is accepted")
	// ErrShutdown means that this driver stops; another one goes on with the run.
	ErrShutdown = errors.New("the driver is shutting down")
)

// StepError is a failure of a step, with the layer that owns it.
type StepError struct {
	Layer     commonv1.OwnerLayer
	Reason    commonv1.Reason
	Public    string // one sentence, shown to people
	Retryable bool
	Final     bool          // ends an undo too, which is otherwise tried again
	After     time.Duration // not before; zero: the step's policy
	// LastOutput is the end of the output of a tenant's workload, if the workload's failure is this one. It is for people
	// of the tenant and operators alone.
	LastOutput string
	cause      error
}

// Error returns the text for logs, with the cause.
func (e *StepError) Error() string {
	text := names.Of(e.Reason) + ": " + e.Public
	if e.cause != nil {
		text += ": " + e.cause.Error()
	}
	return text
}

// causeLimit is how many characters of a cause are kept.
const causeLimit = 600

// Cause returns the text of the cause, for operators: one line, with secrets redacted, of at most causeLimit
// characters. It is empty if there is no cause.
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

// Unwrap returns the cause.
func (e *StepError) Unwrap() error { return e.cause }

// WithCause sets the cause, which only logs and operators see, and returns e.
func (e *StepError) WithCause(cause error) *StepError {
	e.cause = cause
	return e
}

// Fail returns an error after which the step is not tried again: it fails for good.
func Fail(layer commonv1.OwnerLayer, reason commonv1.Reason, public string, cause error) error {
	return &StepError{Layer: layer, Reason: reason, Public: public, cause: cause}
}

// GiveUp returns an error that ends an undo as well, whose policy would otherwise try it again. It is for an undo that
// is past the time in which another try could help.
func GiveUp(layer commonv1.OwnerLayer, reason commonv1.Reason, public string, cause error) error {
	return &StepError{Layer: layer, Reason: reason, Public: public, Final: true, cause: cause}
}

// Retry returns an error after which the step is tried again, within its policy.
func Retry(layer commonv1.OwnerLayer, reason commonv1.Reason, public string, cause error) error {
	return &StepError{Layer: layer, Reason: reason, Public: public, Retryable: true, cause: cause}
}

// StepErrorOf converts an error of a step to a StepError. A StepError keeps its class; an empty Layer or Public is
// filled in. A fault of a peer is retryable if and only if its action is to wait. Any other error is retryable, and
// only operators see its text, as the cause.
func StepErrorOf(step *Step, err error) *StepError {
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

// Interrupted reports whether err interrupts a step that neither failed nor succeeded: the lease is lost, or the run is
// paused.
func Interrupted(err error) bool { return errors.Is(err, ErrFenced) || errors.Is(err, ErrPaused) }
