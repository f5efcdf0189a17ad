// Package saga runs workspaces' operations as durable sagas on Postgres.
//
// It owns the rows saga_run (truth, queue entry, lease and fence in one), saga_step (the timeline), resource_claim (what an undo works from) and
// the core columns of workspace. It believes only a fence that SQL confirmed in the same transaction; it never judges by a Go clock: leases,
// deadlines and stalls are mesh.clock()'s. It knows nothing of what a step does.
//
// Guarantees: one live run a workspace (a partial unique index decides); a write of a driver that lost its lease is refused, and the driver
// stops silently; a step costs one transaction (write the attempt that ends, open the next in the run's row, one event); a driver that dies
// is replaced within the lease and a poll; a wake is never lost between a step's look and its park; a compensation runs in reverse from the
// claims, so that commit-then-crash is undone too; a live run always says what it waits for.
//
//	pending ──► running ◄──► waiting ──► succeeded
//	   │           │            │
//	   └───────────┴────────────┴──► compensating ──► failed (clean)
//	                                      │  ▲
//	                                      ▼  │ retry-undo, skip-undo
//	                                    stuck ──► failed (closed by a decommission)
//
// Order of locks: gates and tasks, then runs, then workspaces, then allocations, instances and claims.
// docs/architecture.md has the whole of it.
package saga
