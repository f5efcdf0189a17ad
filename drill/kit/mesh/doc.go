// Package mesh has the mesh on which drills run: one of their own, made of separate processes with short policy values,
// or that of another operator, of which only the API is known.
//
// It makes requests as people do and repeats those whose answers are lost, waits until workspaces serve, and finds the
// instances and machines of a mesh of the drills' own. It does not judge a drill, and uses no SQL and no service behind
// the API.
package mesh
