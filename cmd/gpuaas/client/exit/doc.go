// Package exit decides what the end of a command means: the exit code of an error, and how the error is printed.
//
// An error of the mesh keeps the text, the remedy and the reason of the owner who refused. Usage marks a mistake in the
// command line; an Error carries the exit code of a result that is no refusal. It does not end the process.
//
//	error → CodeOf → exit code
//	      → Report → text or JSON on standard error
package exit
