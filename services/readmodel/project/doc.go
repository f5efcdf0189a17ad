// Package project keeps readmodel's tables: one row an aggregate, made from the event log and from nothing else.
//
// It owns the projected tables and the cursor `projections`. It believes an event's payload (it carries the whole row) and its version; it reads no
// other service's table, decides nothing, and derives nothing that is not in an event. What people are told is made from these rows by package view.
//
// Guarantees: applying is idempotent and keeps the highest version of each aggregate, whatever the order in which aggregates come; the rows and the
// cursor move in one transaction; an event that cannot be applied is parked and the rest goes on; the tables equal what event 0 up to the cursor
// makes anew (Verify), but for what was parked.
package project
