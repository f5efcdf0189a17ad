// Package guard is the drift guard: it finds the rows of workspaces, runs and allocations that were changed outside
// their saga, and decides when such a change is settled.
//
// It knows the product's writes from all others by a setting of the session (pg.WriterSetting). A trigger records
// evidence of any other write: the row before and after, and by whom. Each row carries a seal, a digest over all its
// columns that the trigger renews: after a write without the trigger the row does not fit its seal. The guard reads the
// evidence, and reads all live rows only in a process's first scan, after the triggers were changed, and while one does
// not fire: its work grows with the changes by hand, not with the rows.
//
// It changes no row, except that it puts a new seal on a row whose finding is acknowledged. The table in
// docs/findings.md lists which edits are detected, and which are not.
package guard
