// Package lease has the leases of runs: which driver may drive a run, and until when.
//
// A Keeper has the leases of one driver. It takes runs that are due, closes the attempts that lost drivers left open,
// and opens the next ones. It extends all leases by heartbeats, and ends the context of a step whose run was cancelled
// or whose lease is lost. It makes a run stuck that this build cannot drive, so that the run does not block the others.
// Package drive decides what a leased run does.
//
// Guarantees: each lease raises the run's fence, so that the writes of the driver before are refused; a lease is
// trusted for less time than it was granted, counted from before it was requested; a heartbeat that waits for a locked
// row delays neither the other leases nor a cancel.
package lease
