// Package saga has the operations of workspaces as durable sagas on Postgres: their definitions, and what is asked of
// their runs. It starts, joins, cancels, wakes and retries runs, helps stuck ones, and gives a step the environment in
// which it is called. Package saga/lease decides who may drive a run, package saga/drive drives it, and package
// saga/stall flags what makes no progress.
//
// They own the rows saga_run (the run's state, its queue entry, its lease and its fence in one row), saga_step
// (the timeline) and the core columns of workspace; what an undo works from is the ledger of package claims. They trust
// only a fence that SQL confirmed in the same transaction, and compare leases, deadlines and stalls with mesh.clock(),
// never with a Go clock. They do not know what a step does.
//
// Guarantees: a workspace has at most one live run (a partial unique index enforces it); a write of a driver that lost
// its lease is refused, and the driver stops silently; a step costs one transaction (write the attempt that ends, open
// the next in the run's row, one event); a driver that dies is replaced within the lease and a poll; a wake that comes
// between a step's check and its park is not lost; a compensation runs in reverse from the claims, so that the effect
// of a step whose driver crashed after the commit is undone too; the row of a live run always has the reason why it
// waits.
//
//	pending ──► running ◄──► waiting ──► succeeded
//	   │           │            │
//	   └───────────┴────────────┴──► compensating ──► failed (clean)
//	                                      │  ▲
//	                                      ▼  │ retry-undo, skip-undo
//	                                    stuck ──► failed (closed by a decommission)
//
// Order of locks: gates and tasks, then runs, then workspaces, then allocations, instances and claims.
// docs/architecture.md describes the whole.
package saga
