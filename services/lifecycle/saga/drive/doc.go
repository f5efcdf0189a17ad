// Package drive drives runs: a Driver claims workers for the runs that it has leased, executes their steps, and decides
// by a step's outcome what follows.
//
// It writes what follows as transitions: the open attempt closes, and either the next one opens or the run leaves its
// driver, parked, ended or stuck. Transitions of different runs share a transaction. Each is a compare-and-set on the
// run's fence, step and direction, with the step's own rows in the same transaction. Leases are had by package lease;
// which runs there are, and what is asked of them, is decided by package saga.
//
// Guarantees: a step's function is called while its run is leased, and is ended when the lease is lost, the run is
// cancelled, the budget is used up or the driver stops; a step that does not end within the grace is abandoned, and the
// fence is raised; a transition whose commit is unknown is never repeated: the next lease reads what became of it.
package drive
