// Package watchdog owns what is done for a workspace without being asked: it sees from events that one is stalled, that its instance has no session or cannot
// enrol, asks lifecycle to recreate it, and keeps the record of how that went. It owns recovery records, incidents, the budget of recreations and the
// fleet brake.
//
// It believes lifecycle's and nodeapi's events, in their order, and the database's clock. Silence while nobody listened is no evidence. It never touches
// a workspace: it asks lifecycle, which joins, refuses or does it. It never acts on a workspace that is being undone or is stuck, never against a person
// whose operation is open, never on a node whose identity is held, and never on a machine that it cannot ask.
//
// Guarantees: at most one open recovery a workspace; a request is written down before it is sent and repeated under the same idempotency key until it
// is answered, so that a crash between the two makes no second operation; a recreation takes its tokens in the transaction that writes it down, so that
// budgets are exact however many replicas run; an engaged brake lets nothing through that was not sent before; a recovery ends as recovered when the step
// that stalled has succeeded or the workspace is active, and on nothing less.
package watchdog
