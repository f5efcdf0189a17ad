// Package calls is the client's side of an RPC: connections that refuse every server but the expected one, deadlines,
// the ids of the caller's context in the headers, a second and third try of idempotent calls that did not reach the
// server, and the refusals of a server rebuilt as faults.
//
// It does not choose among servers, and it never repeats a call that may have had an effect.
package calls
