// Package pg is how the mesh uses Postgres: pools, transactions, errors and the names of its roles.
//
// The database has the schema mesh (clock, era, policy), one schema and one login role per service, the role of the
// sequencer, the owner that no service logs in as, and the separate database of workloads; package schema makes them.
// Package pg reports a commit only when the server confirmed it: a commit whose answer was lost is ErrCommitUnknown,
// which is never retried and never reported as a failure. It never decides by a Go clock: time in SQL is mesh.clock(),
// numbers follow mesh.next(n).
//
// Guarantees: pools dial lazily; InTx runs its function again only when the server reported that it rolled the
// transaction back.
package pg
