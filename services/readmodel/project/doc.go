// Package project maintains readmodel's tables: one row for each aggregate, made from the event log and from nothing
// else.
//
// It owns the projected tables and the cursor `projections`. It trusts an event's payload, which carries the whole row,
// and its version; it reads no other service's table, decides nothing, and derives nothing that is not in an event.
// With the rows it queues for the notifier the nodes and workspaces whose impact may have changed
// (readmodel.impact_due).
// Package view makes the answers for people from these rows.
//
// Guarantees: applying is idempotent and keeps the highest version of each aggregate, whatever the order of the events
// of different aggregates; the rows and the cursor move in one transaction; an event that cannot be applied is parked
// and later events are applied; the tables equal a fresh projection of the events from 0 up to the cursor (see Verify),
// except for parked events.
package project
