// Package findings looks for what cannot be: rows and resources that contradict each other, and rows that were changed behind their saga's back.
//
// It owns the findings, the suspicions that come before them, and the evidence of changes by hand. It believes no single source. Each look reads two of them in the order in which work under way cannot look broken (what is claimed before what is there, and the
// claims once more), passes over workspaces that a run holds, and wants to see a thing in two sweeps, further apart than a grace of the database's
// clock, before it is a finding. Where a source does not answer, nothing is concluded: neither a finding nor the end of one.
//
// An instance of an epoch that is over and that was started again needs no second look: recovery, or its driver, has refused or ended it already. It has
// a sweep of its own.
//
// It never changes what it looks at, but that an acknowledgement puts a new seal on a row whose seal did not fit. All it does besides telling is to
// cordon a node, and to end a cordon of its own when its finding is over.
//
// The drift guard is a trigger on the rows of workspaces, runs and allocations. It knows the product's writes from all others by a setting of the session
// (pg.WriterSetting), and leaves evidence of before, after and who of any other. Each row carries a seal, a digest over all its columns that the trigger
// renews: one that the trigger did not see leaves a row that does not fit its seal. The guard reads the evidence, and reads rows only after somebody
// meddled with the triggers: its work grows with what changes by hand, not with the rows.
//
// A finding on a row ends when what was changed by hand has been put back by hand, or when a person acknowledges it; never because an operation has
// written over it. docs/findings.md has the table of what is seen of which edit, and what is not.
package findings
