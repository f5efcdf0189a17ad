// Package auditlog maintains the audit log of the mesh: one row for each audit entry of the event log, in the order of
// positions, each with a hash that covers the row before it; and checkpoints, which sign a row and with it all rows up
// to it.
//
// It owns readmodel.audit, its head and its checkpoints, and the cursor `audit`. It trusts the events' payloads and the
// keys of UseKeys, and decides nothing about who did what.
//
// Guarantees: the log has no gaps, since an entry that cannot be appended is retried and never skipped; Verify finds a
// row that was changed, removed or added beside the events; rows are cut only behind a signed checkpoint, from which
// the chain continues.
package auditlog
