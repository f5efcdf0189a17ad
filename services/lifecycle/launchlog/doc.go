// Package launchlog compares the launch logs of placements with the database, and reports to recovery the differences
// which show that one of them was restored from an older copy.
//
// It relies only on the order in which lifecycle works: a workspace, its epoch and the row of an instance are committed
// before the instance is launched; a row is marked ending before an end is asked for; an instance is live in its row
// only after the log had it. A log that contradicts that order shows that the database was restored; a log without an
// instance that the database has confirmed shows that the log was. It launches and ends nothing.
//
// A process compares a whole log first and then every ten minutes; between that, what was written since the last time.
//
// Guarantees: this process launches nothing before the first comparison is done and all its differences are reported; a
// difference that a person has accepted is not reported again.
package launchlog
