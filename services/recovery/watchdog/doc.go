// Package watchdog owns the recovery of workspaces without a person's request: from events it detects that a workspace
// is stalled, or that its instance has no session or cannot enrol, asks lifecycle to recreate it, and keeps the record
// of the outcome. It owns the facts that it reads from events, recovery records and the budget of recreations. When
// recoveries stop because too much fails at once, and which failures have one cause, is decided by package fleet in the
// same rounds.
//
// It relies on lifecycle's and nodeapi's events, in their order, and on the database's clock. A node's silence while no
// replica of nodeapi listened is no evidence. It never touches a workspace: it sends a request to lifecycle, which
// joins an open operation, refuses, or recreates the workspace. It never acts on a workspace that is being undone or is
// stuck, never against a person whose operation is open, never on a node whose identity is held, and never on a machine
// that it cannot reach.
//
// Guarantees: at most one open recovery for each workspace; a request is stored before it is sent and repeated under
// the same idempotency key until it is answered, so that a crash between the two makes no second operation; a
// recreation takes its tokens in the transaction that stores the request, so that budgets are exact however many
// replicas run; while the brake is engaged, no request is sent that was not sent before; a recovery ends as recovered
// when the step that stalled has succeeded or the workspace is active, and on nothing less.
package watchdog
