// Package fault owns refusals: decisions that go to a peer or a person with a reason, a sentence and what to do next.
//
// A fault is made where the decision is known (New). Every other error is an ordinary one with a cause, which leaves a
// process only as "internal error". The package takes code, action and sentences from its one table by reason, and a
// test checks that the table is complete; of what a peer sent it uses only the reason's number and the texts of its
// Denial. It never logs.
//
// Guarantees: no text of a driver, a socket or a peer reaches a client unless a call of New has it in its text; a
// reason that this build does not know means wait.
package fault

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// Error is a refusal. Public, Remedy and Unmet are written for people and may leave the process; the cause is for logs
// only.
type Error struct {
	Reason        commonv1.Reason
	Public        string          // one sentence
	Remedy        string          // what would make the request succeed
	Action        commonv1.Action // overrides the table's action for this one refusal; unspecified: the table's
	RetryAfter    time.Duration   // not before; zero: the caller's own backoff
	Unmet         []string        // the conditions that prevent the request, each as it is now
	ConflictingID string          // the id of the object that prevents the request
	CorrelationID string          // set on faults rebuilt from a peer

	cause error
}

// Option sets a field of a fault made by New.
type Option func(*Error)

// Cause keeps the error behind the refusal for logs; it never leaves the process.
func Cause(err error) Option { return func(e *Error) { e.cause = err } }

// RetryAfter sets the least time before the peer may send the request again.
func RetryAfter(d time.Duration) Option { return func(e *Error) { e.RetryAfter = d } }

// Unmet adds the conditions that prevent the request, each as it is now: "the workspace has no instance", not the
// precondition that does not hold. A condition about a field begins with the field's path and a colon.
func Unmet(conditions ...string) Option {
	return func(e *Error) { e.Unmet = append(e.Unmet, conditions...) }
}

// Remedy sets the text of what would make the request succeed; without it the table's remedy is sent.
func Remedy(text string) Option { return func(e *Error) { e.Remedy = text } }

// Conflicting sets the id of the object that prevents the request.
func Conflicting(id string) Option { return func(e *Error) { e.ConflictingID = id } }

// WithAction overrides the table's action for this refusal.
func WithAction(a commonv1.Action) Option { return func(e *Error) { e.Action = a } }

// New returns a refusal. If public is empty, the table's sentence is sent.
func New(reason commonv1.Reason, public string, opts ...Option) *Error {
	e := &Error{Reason: reason, Public: public}
	for _, opt := range opts {
		opt(e)
	}
	row := RowOf(reason)
	if e.Public == "" {
		e.Public = row.Public
	}
	if e.Remedy == "" {
		e.Remedy = row.Remedy
	}
	if e.RetryAfter == 0 {
		e.RetryAfter = row.RetryAfter
	}
	return e
}

// Error returns the text for logs, cause included. It is not for clients.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(names.Of(e.Reason))
	b.WriteString(": ")
	b.WriteString(e.Public)
	if len(e.Unmet) > 0 {
		b.WriteString(" (unmet: " + strings.Join(e.Unmet, "; ") + ")")
	}
	if e.cause != nil {
		b.WriteString(": " + e.cause.Error())
	}
	return b.String()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.cause }

// Is makes errors.Is match two faults of the same reason.
func (e *Error) Is(target error) bool {
	other, ok := target.(*Error) // errors.Is walks the chain and asks each link about target itself
	return ok && other.Reason == e.Reason
}

// As returns the outermost fault in err's chain.
func As(err error) (*Error, bool) {
	return errors.AsType[*Error](err)
}

// From returns err as a fault: itself if it is one, deadline_exceeded or unavailable for a context's end, else
// internal. nil stays nil.
func From(err error) *Error {
	if err == nil {
		return nil
	}
	if e, ok := As(err); ok {
		return e
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return New(commonv1.Reason_REASON_DEADLINE_EXCEEDED, "", Cause(err))
	case errors.Is(err, context.Canceled):
		return New(commonv1.Reason_REASON_UNAVAILABLE, "", Cause(err))
	}
	if e, ok := fromLocalConnect(err); ok {
		return e
	}
	return New(commonv1.Reason_REASON_INTERNAL, "", Cause(err))
}

// ReasonOf returns the reason of From(err), and unspecified for nil.
func ReasonOf(err error) commonv1.Reason {
	if err == nil {
		return commonv1.Reason_REASON_UNSPECIFIED
	}
	return From(err).Reason
}

// Has reports whether err's chain has a fault of this reason.
func Has(err error, reason commonv1.Reason) bool {
	return errors.Is(err, &Error{Reason: reason})
}

// ActionOf returns what a refused peer does next. An error that is not a fault, and a reason that this build does not
// know, mean wait; nil has no action.
func ActionOf(err error) commonv1.Action {
	if err == nil {
		return commonv1.Action_ACTION_UNSPECIFIED
	}
	e, ok := As(err)
	if !ok {
		return commonv1.Action_ACTION_WAIT
	}
	return e.action()
}

// RetryAfterOf returns the least time that the peer asked us to wait, zero if it set none.
func RetryAfterOf(err error) time.Duration {
	if e, ok := As(err); ok {
		return e.RetryAfter
	}
	return 0
}

func (e *Error) action() commonv1.Action {
	row, known := lookup(e.Reason)
	if !known {
		return commonv1.Action_ACTION_WAIT
	}
	if _, valid := commonv1.Action_name[int32(e.Action)]; valid && e.Action != commonv1.Action_ACTION_UNSPECIFIED {
		return e.Action
	}
	return row.Action
}

// Fields returns the fault as pairs for a log line: reason, action and, where set, the conflicting id and the wait in
// seconds.
func (e *Error) Fields() []string {
	out := []string{"reason", names.Of(e.Reason), "action", names.Of(e.action())}
	if e.ConflictingID != "" {
		out = append(out, "conflicting_id", e.ConflictingID)
	}
	if e.RetryAfter > 0 {
		out = append(out, "retry_after_seconds", strconv.FormatFloat(e.RetryAfter.Seconds(), 'f', -1, 64))
	}
	return slices.Clip(out)
}
