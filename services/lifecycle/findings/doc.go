// Package findings detects contradictions: rows and resources that contradict each other, and rows that were changed
// outside their saga.
//
// It owns the findings, the suspicions that come before them, and the evidence of changes by hand. It trusts no single
// source. Each detector compares two of them. It reads them in an order in which work under way does not look broken
// (the claims, then the resources, then the claims again), and skips workspaces with a live run. A contradiction
// becomes a finding only when two sweeps see it that are further apart than a grace by the database's clock. If a
// source does not answer, the detector concludes nothing: it neither opens nor ends a finding.
//
// Two detectors may see the same contradiction, each by its own sources. Each has a suspicion of its own, and needs two
// sweeps of its own. They share one finding, which ends when none of them sees the contradiction any more. What was
// seen only by a detector that no replica runs any more, as its placement was taken out of the configuration, ends some
// time after it was last seen.
//
// An instance of an ended epoch that was started again needs no second scan: recovery, or its driver, has refused or
// ended it already. It has a sweep of its own.
//
// It never changes the rows that it compares, except that an acknowledgement puts a new seal on a row whose seal did
// not fit. Beside reporting it only cordons a node, and ends a cordon of its own when its finding is over.
//
// The rooms below decide the rest: detect what contradicts what, guard which rows were changed by hand, finding how a
// finding is kept, and scan how tables are read in pages. This package lists the sources, and has the sweeps, the
// suspicions and the acknowledgement.
//
// A finding on a row ends when the change has been put back by hand, or when a person acknowledges it; never because an
// operation has written over it.
package findings
