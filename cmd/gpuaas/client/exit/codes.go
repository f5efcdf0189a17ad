package exit

import (
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// Exit codes. Codes returns what each means.
const (
	CodeOK          = 0
	CodeError       = 1
	CodeUsage       = 2
	CodeNotFound    = 3
	CodeNotAllowed  = 4
	CodeRefused     = 5
	CodeTimeout     = 6
	CodeBudget      = 7
	CodeInterrupted = 130
)

// Code is an exit code with its meaning.
type Code struct {
	Code    int
	Meaning string
}

// Codes returns all exit codes in order.
func Codes() []Code {
	return []Code{
		{CodeOK, "ok"},
		{CodeError, "error of the mesh or of the connection, or a question that was not answered with yes"},
		{CodeUsage, "mistake in the command line, in a file that it names, or in a value that the mesh refuses"},
		{CodeNotFound, "what was named does not exist, or is not yours to see"},
		{CodeNotAllowed, "not authenticated, or not allowed"},
		{CodeRefused, "refused because a precondition does not hold; or the operation ended elsewhere than wanted"},
		{CodeTimeout, "timed out waiting; what was asked for goes on"},
		{CodeBudget, "a drill or a bench missed what is required of it"},
		{CodeInterrupted, "interrupted, by Ctrl-C for one; what was asked for goes on"},
	}
}

// Interrupt returns the error of a command that Ctrl-C or SIGTERM ended. message is the only line that is printed.
func Interrupt(message string) error {
	return &Error{Code: CodeInterrupted, Reason: commonv1.Reason_REASON_CANCELLED, Message: message}
}
