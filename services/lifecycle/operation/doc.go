// Package operation decides whether an operation may be asked for now: it joins the one that is under way, begins one,
// or refuses with the reason and what would make it succeed. It serves the requests on workspaces and
// allocations, and says beforehand what a request would do. Its rules: one open run a workspace for all requesters; a
// repeated key returns the first result; a refusal changes nothing and is audited.
//
// Single-flight is the saga core's duty: a caller who would create or replace a workspace calls RequestOperation, and
// the database decides. An open operation is joined; for the watchdog alone, one that waits for an instance which does
// not come is cancelled in the transaction of the recreation that takes its place.
package operation
