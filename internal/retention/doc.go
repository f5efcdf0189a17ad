// Package retention ends history: it walks rows that have reached the end of their term and has them deleted (cut), in
// bounded batches.
//
// It owns the walk, its pace and its account (mesh.retention). It takes the terms from the policy, and decides about no
// row: the functions of the database that it calls, each of the schema of the service that owns the tables, check every
// row themselves and keep those that are open, live or unread, whatever the term.
//
// Guarantees: one replica walks at a time; a walk that is stopped, as each is after ten minutes, is continued by the
// next one, on any replica; a walk that fails begins anew; no row is cut twice; each batch is a transaction of its own;
// in rollback mode nothing is cut.
package retention
