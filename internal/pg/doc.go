// Package pg is how the mesh uses Postgres: pools, transactions, errors, migrations and roles.
//
// It owns the database's skeleton: the schema mesh (clock, era, policy), one schema and one login role per service, the
// role of the sequencer, the owner that no service logs in as, and the separate database of workloads. It believes a
// commit only when the server said so: a commit whose answer was lost is ErrCommitUnknown, never retried and never
// called a failure. It never decides by a Go clock: time in SQL is mesh.clock(), numbers follow mesh.next(n).
//
// Guarantees: pools dial lazily; InTx runs its function again only when the server said that nothing of it happened;
// Migrate and Provision may be run by several processes at once and any number of times.
package pg
