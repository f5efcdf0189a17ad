// Package findings looks for what cannot be: rows and resources that contradict each other, and rows that were changed behind their saga's back.
//
// It owns the findings, the suspicions that come before them, and the witness: what the event log last said of each row that sagas own. It believes no
// single source. Each look reads two of them in the order in which work under way cannot look broken (what is claimed before what is there, and the
// claims once more), passes over workspaces that a run holds, and wants to see a thing in two sweeps, further apart than a grace of the database's
// clock, before it is a finding. Where a source does not answer, nothing is concluded: neither a finding nor the end of one.
//
// An instance of an epoch that is over and that was started again needs no second look: recovery, or its driver, has refused or ended it already. It has
// a sweep of its own.
//
// It never changes what it looks at, but that an acknowledgement puts a new seal on a row whose seal did not fit. All it does besides telling is to
// cordon a node, and to end a cordon of its own when its finding is over.
//
// The drift guard knows the product's writes from all others in two ways. A row carries a seal, a digest over all its columns, which each write of the
// product breaks in its statement and a trigger renews; a write that does not break it leaves evidence of before, after and who, and one that the
// trigger did not see leaves a row that does not fit its seal. And whoever changes a row raises its version and appends the whole row as an event in the
// same transaction, so the truth of version n is in the log, which nobody may change: the guard follows the log behind the writers. It sees a row whose
// content differs from the event of its version, a version that no event speaks of, a version that went back, a row that is gone, and, in the log,
// versions left out and fields changed that no operation changes.
//
// A finding on a row ends when what was changed by hand has been put back by hand, or on a person's word; never because an operation has written over
// it. The guard does not see a forger, who breaks the seal as the product does, or keeps the trigger from firing and computes the digest; of that the
// log still shows what events carry.
package findings
