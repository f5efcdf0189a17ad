package exit

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"regexp"
	"slices"
	"strings"

	"connectrpc.com/connect"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// usageError is a mistake in the command line or in the client's files.
type usageError struct {
	cause  error
	remedy string // may be empty: then the error says what to give
}

func (e *usageError) Error() string { return e.cause.Error() }
func (e *usageError) Unwrap() error { return e.cause }

// Usage marks an error as a mistake in the command line: exit code 2. It returns an error that is marked already
// unchanged.
func Usage(err error) error {
	if _, marked := errors.AsType[*usageError](err); marked || err == nil {
		return err
	}
	return &usageError{cause: err}
}

// UsageHint marks an error as a mistake in the command line, and adds what to give instead.
func UsageHint(err error, remedy string) error { return &usageError{cause: err, remedy: remedy} }

// Error carries the exit code of a result that is no refusal: a workspace that ended failed, or a wait that took
// too long.
type Error struct {
	Code    int
	Reason  commonv1.Reason
	Message string
	Remedy  string
}

func (e *Error) Error() string { return e.Message }

// OverBudget returns the error of a drill or a bench that missed its budget: exit code 7.
func OverBudget(message, remedy string) error {
	return &Error{
		Code: CodeBudget, Reason: commonv1.Reason_REASON_PRECONDITION_FAILED, Message: message,
		Remedy: remedy,
	}
}

// TracedError is an error with the correlation id of its request.
type TracedError struct {
	Cause         error
	CorrelationID string
}

func (e *TracedError) Error() string { return e.Cause.Error() }
func (e *TracedError) Unwrap() error { return e.Cause }

// failure is an error as it is printed.
type failure struct {
	Code              string   `json:"code"`
	Reason            string   `json:"reason"`
	Action            string   `json:"action"`
	Message           string   `json:"message"`
	Remedy            string   `json:"remedy"`
	RetryAfterSeconds float64  `json:"retry_after_seconds"`
	CorrelationID     string   `json:"correlation_id"`
	ConflictingID     string   `json:"conflicting_id"`
	Unmet             []string `json:"unmet"`
}

// CodeOf returns the exit code of an error.
func CodeOf(err error) int {
	if err == nil {
		return CodeOK
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Code
	}
	if _, ok := errors.AsType[*usageError](err); ok {
		return CodeUsage
	}
	e, ok := fault.As(err)
	if !ok {
		switch {
		case misused(err):
			return CodeUsage
		case stopped(err):
			return CodeInterrupted
		}
		return CodeError
	}
	switch code := wireCode(e); code { // everything else is an error of the mesh, not of the request
	case connect.CodeInvalidArgument:
		return CodeUsage
	case connect.CodeNotFound:
		return CodeNotFound
	case connect.CodeUnauthenticated:
		return CodeNotAllowed
	case connect.CodePermissionDenied:
		return permissionExit(e.Reason)
	case connect.CodeFailedPrecondition, connect.CodeAlreadyExists, connect.CodeAborted:
		return CodeRefused
	case connect.CodeResourceExhausted:
		if e.Reason == commonv1.Reason_REASON_NO_CAPACITY {
			return CodeRefused
		}
	}
	return CodeError
}

// stopped reports whether an error means that a signal ended the command.
func stopped(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, app.ErrShutdown)
}

// permissionExit returns the exit code of a permission_denied: ExitRefused if the state of the identity or the task is
// the cause, else ExitNotAllowed, as the person lacks the right.
func permissionExit(reason commonv1.Reason) int {
	if strings.HasPrefix(names.Of(reason), "identity_") || strings.HasPrefix(names.Of(reason), "task_") {
		return CodeRefused
	}
	return CodeNotAllowed
}

// wireCode returns the code of a refusal: that of the table, or that on the wire if the peer that refused is no service
// of the mesh.
func wireCode(e *fault.Error) connect.Code {
	if failed, ok := errors.AsType[*connect.Error](e); ok && e.CorrelationID == "" && connect.IsWireError(failed) {
		switch failed.Code() { // only these say more than the reason
		case connect.CodeUnauthenticated, connect.CodePermissionDenied:
			return failed.Code()
		}
	}
	return fault.RowOf(e.Reason).Code
}

// misused reports whether an error is cobra's own about a command line.
func misused(err error) bool {
	return slices.ContainsFunc([]string{
		"unknown command", "unknown flag", "unknown shorthand", "flag needs an argument",
		"invalid argument", "required flag", "accepts ", "if any flags in the group",
		"at least one of the flags in the group",
	}, func(prefix string) bool { return strings.HasPrefix(err.Error(), prefix) })
}

var (
	notSet    = regexp.MustCompile(`^required flag\(s\) (".+") not set$`)
	exclusive = regexp.MustCompile(`^if any flags in the group .* none of the others can be; \[(.+)\] were all set$`)
)

// plain returns the text of a parser's error about several flags as the client's own errors name flags.
func plain(text string) string {
	if found := notSet.FindStringSubmatch(text); found != nil {
		return "it needs --" + strings.Join(strings.Split(strings.Trim(found[1], `"`), `", "`), ", --")
	}
	if found := exclusive.FindStringSubmatch(text); found != nil {
		return "--" + strings.Join(strings.Fields(found[1]), " and --") + " exclude each other: give one of them"
	}
	return text
}

// describe returns the printed form of an error.
func describe(err error) failure {
	out := failure{Unmet: []string{}}
	if traced, ok := errors.AsType[*TracedError](err); ok {
		out.CorrelationID = traced.CorrelationID
	}
	if e, ok := errors.AsType[*Error](err); ok {
		out.Code, out.Reason, out.Action = fault.RowOf(e.Reason).Code.String(), names.Of(e.Reason),
			names.Of(fault.RowOf(e.Reason).Action)
		if e.Code == CodeTimeout {
			out.Code = connect.CodeDeadlineExceeded.String()
		}
		if e.Code == CodeInterrupted {
			out.CorrelationID = ""
		}
		out.Message, out.Remedy = e.Message, e.Remedy
		return out
	}
	_, refused := fault.As(err)
	if e, ok := errors.AsType[*usageError](err); ok || (!refused && misused(err)) {
		if ok {
			out.Remedy = e.remedy
		}
		out.Code, out.Reason, out.Action = connect.CodeInvalidArgument.String(),
			names.Of(commonv1.Reason_REASON_INVALID_ARGUMENT), names.Of(commonv1.Action_ACTION_STOP)
		out.Message = plain(err.Error())
		return out
	}
	e, ok := fault.As(err)
	if !ok {
		out.Code, out.Reason, out.Action = connect.CodeInternal.String(), names.Of(commonv1.Reason_REASON_INTERNAL),
			names.Of(commonv1.Action_ACTION_STOP)
		out.Message = err.Error()
		if stopped(err) {
			return describe(Interrupt("interrupted"))
		}
		return out
	}
	row := fault.RowOf(e.Reason)
	out.Code, out.Reason, out.Action = wireCode(e).String(), names.Of(e.Reason), names.Of(fault.ActionOf(e))
	out.Message, out.Remedy = cmp.Or(e.Public, row.Public), cmp.Or(e.Remedy, row.Remedy)
	out.RetryAfterSeconds, out.ConflictingID = e.RetryAfter.Seconds(), e.ConflictingID
	out.Unmet = append(out.Unmet, e.Unmet...)
	out.CorrelationID = cmp.Or(e.CorrelationID, out.CorrelationID)
	return out
}

// Report prints an error to w: as `{"error": {...}}` if asJSON, else as text with a remedy.
func Report(w io.Writer, err error, asJSON bool) {
	if err == nil {
		return
	}
	if e, ok := errors.AsType[*Error](err); ok && e.Message == "" {
		return
	}
	f := describe(err)
	if asJSON {
		raw, jerr := json.Marshal(map[string]failure{"error": f})
		if jerr == nil {
			human.Note(w, "%s", raw)
			return
		}
	}
	if CodeOf(err) == CodeInterrupted {
		human.Note(w, "%s", human.Clean(f.Message))
		return
	}
	// A message of several lines, such as the problems of a file, keeps its lines.
	lines := strings.Split(strings.TrimSpace(f.Message), "\n")
	human.Note(w, "error: %s: %s", f.Reason, human.Clean(lines[0]))
	for _, line := range lines[1:] {
		human.Note(w, "  %s", human.Clean(line))
	}
	label := "because"
	switch f.Reason {
	case names.Of(commonv1.Reason_REASON_AMBIGUOUS):
		label = "one of"
	case names.Of(commonv1.Reason_REASON_INVALID_ARGUMENT):
		label = "invalid"
	}
	for _, unmet := range f.Unmet {
		if unmet == f.Message {
			continue
		}
		human.Note(w, "  %s: %s", label, human.Clean(unmet))
	}
	if f.ConflictingID != "" {
		human.Note(w, "  in the way: %s", human.Clean(f.ConflictingID))
	}
	if f.Remedy != "" {
		human.Note(w, "  hint: %s", human.Clean(f.Remedy))
	}
	if f.RetryAfterSeconds > 0 {
		human.Note(w, "  retry after: %gs", f.RetryAfterSeconds)
	}
	// A mistake that the client itself has found was never sent, so the mesh does not know its correlation id.
	if _, refused := fault.As(err); f.CorrelationID != "" && (refused || CodeOf(err) != CodeUsage) {
		human.Note(w, "  correlation id: %s", f.CorrelationID)
	}
}
