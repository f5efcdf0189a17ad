package client

import (
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// Exit codes. ExitCodes returns what each means.
const (
	ExitOK          = 0
	ExitError       = 1
	ExitUsage       = 2
	ExitNotFound    = 3
	ExitNotAllowed  = 4
	ExitRefused     = 5
	ExitTimeout     = 6
	ExitBudget      = 7
	ExitInterrupted = 130
)

// ExitCode is an exit code with its meaning.
type ExitCode struct {
	Code    int
	Meaning string
}

// ExitCodes returns all exit codes in order.
func ExitCodes() []ExitCode {
	return []ExitCode{
		{ExitOK, "ok"},
		{ExitError, "error of the mesh or of the connection, or a question that was not answered with yes"},
		{ExitUsage, "mistake in the command line, in a file that it names, or in a value that the mesh refuses"},
		{ExitNotFound, "what was named does not exist, or is not yours to see"},
		{ExitNotAllowed, "not authenticated, or not allowed"},
		{ExitRefused, "refused because a precondition does not hold; or the operation ended elsewhere than wanted"},
		{ExitTimeout, "timed out waiting; what was asked for goes on"},
		{ExitBudget, "a drill or a bench missed what is required of it"},
		{ExitInterrupted, "interrupted, by Ctrl-C for one; what was asked for goes on"},
	}
}

// interrupted returns the error of a command that Ctrl-C or SIGTERM ended. message is the only line that is printed.
func interrupted(message string) error {
	return &exitError{code: ExitInterrupted, reason: commonv1.Reason_REASON_CANCELLED, message: message}
}
