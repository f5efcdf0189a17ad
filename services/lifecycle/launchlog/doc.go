// Package launchlog compares the launch logs of placements with the database, and reports to recovery what shows that one of them was restored from an
// older copy.
//
// It believes what lifecycle does in normal life, and nothing else: a workspace, its epoch and the row of an instance are committed before the instance is
// launched; a row is marked ending before an end is asked for; an instance is live in its row only after the log had it. A log that contradicts that shows
// that the database went back; a log that lacks what the database has confirmed shows that the log did. It launches and ends nothing.
//
// Guarantees: nothing is launched by this process before the first comparison is done, and none of its differences is left unreported; a difference that a
// person has accepted is not reported again.
package launchlog
