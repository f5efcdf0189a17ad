// Package retention ends history: it walks what has reached the end of its term and has it cut, in bounded batches.
//
// It owns the walk, its pace and its account (mesh.retention). It believes the policy about terms, and decides about no
// row: the functions of the database that it calls, each of the schema of the service that owns the tables, look at
// every row themselves and keep what is open, live or unread, whatever the term.
//
// Guarantees: one replica walks at a time; a walk that is stopped, as one is after ten minutes, goes on where it was with
// the next one, on whichever replica; one that fails begins anew; none cuts anything twice; each batch is a transaction of
// its own; in rollback mode nothing is cut.
package retention
