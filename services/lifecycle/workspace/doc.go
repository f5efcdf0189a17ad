// Package workspace has the rows of workspaces: how a row is read, inserted, changed and announced.
//
// It knows no run and no step. The saga core changes a workspace beside the run that owns it through Touch, in its own
// transaction; a change is written only if the workspace belongs to that run. Two statements of the core write columns
// of a workspace and of its run at once, because one decides about the other: the start of a run and the drawing of
// operation numbers.
//
// The row of a workspace is locked after its run's. docs/architecture.md describes the order of locks.
package workspace
