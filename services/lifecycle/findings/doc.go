// Package findings looks for what cannot be: rows and resources that contradict each other, and rows that were changed behind their saga's back.
//
// It owns the findings, the suspicions that come before them, and the witness: what the event log last said of each row that sagas own. It believes no
// single source. Each look reads two of them in the order in which work under way cannot look broken (what is claimed before what is there, and the
// claims once more), passes over workspaces that a run holds, and wants to see a thing in two sweeps, further apart than a grace of the database's
// clock, before it is a finding. Where a source does not answer, nothing is concluded: neither a finding nor the end of one.
//
// It never changes what it looks at. All it does besides telling is to cordon a node, and to end a cordon of its own when its finding is over.
//
// The drift guard compares each row with the last event that speaks of it. Whoever changes a row of a workspace, a run or an allocation raises its
// version and appends the whole row as an event in the same transaction, so the truth of version n is in the log, which nobody may change. The guard
// follows the log behind the writers and costs them nothing. It sees a row whose content differs from the event of its version, a version that no event
// speaks of, a version that went back, a row that is gone, and, in the log, versions left out and fields changed that no operation changes. It does not
// see: columns that no event carries (leases, wakes, counters, a run's input); a change that was made and taken back between two sweeps; a change that
// the saga's next write announced as its own before a sweep came by, unless it broke the sequence or touched a field that no operation changes; and a
// forger who may write events as well.
package findings
