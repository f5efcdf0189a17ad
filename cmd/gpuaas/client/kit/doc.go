// Package kit has what each command of the client uses: the global flags, the session with the mesh, the lookup of
// names, lists and the following of their changes, questions before a loss, and completion.
//
// It trusts the answers of the one server that proves to be the mesh's (its identity under the context's authority). It
// knows no command: packages such as workspaces and nodes make theirs from it, and it imports none of them.
//
// Guarantees: Run ends a command on a signal with the exit code of an interrupt; a follow resumes a broken watch where
// it stopped, and returns only an error that a later attempt would get as well.
//
//	flags, environment, contexts file → Target → Session (TLS 1.3, bearer token) → handler of a command
package kit
