// Package operations prints the answer to a command that begins an operation on a workspace, or that only asks what the
// operation would do. Commands of several nouns begin operations; this package has no command of its own.
package operations
