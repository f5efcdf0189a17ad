// Package workspaces has the commands about workspaces: their creation, their state and its history, the output of
// their workloads, and the operations on them.
//
// It does not decide which operation is possible: the owner does, and a refusal is printed as the owner wrote it. A
// wait survives the restart of any part of the mesh, and its error names the state in which the workspace came to rest.
package workspaces
