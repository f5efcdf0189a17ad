// Package runs has the rows of runs and of their attempts: their states, how they are read, and the events that
// announce them.
//
// An attempt that is open has no row of its own at first: the row of its run describes it, until it is parked, ends, or
// has a heartbeat, progress or a flag. Open returns such an attempt, and KeepOpen gives it its row.
//
// A Buffer collects what a transaction changed and appends one event for each run, which carries the attempts that
// changed with it.
//
// The package decides nothing about a run. It knows no step's function, no lease and no driver.
package runs
