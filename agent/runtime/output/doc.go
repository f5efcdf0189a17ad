// Package output keeps what a workload writes, and shows it without the values of its environment.
//
// It keeps the output of two runs, the present and the previous one. A Recorder, which the shim of the workload has,
// begins a file for each run and cuts one that grows too large; the end of the part that was cut is kept as its former
// piece. output.json has which run is in which file; it changes together with the files under a lock. A Reader, which
// the agent has, reads pieces of at most MaxPiece bytes by a cursor.
//
// Guarantees: output that is not kept is counted, and never joined to what is kept behind it; a failure or a kill at
// any step of a change loses no output that was kept; a masked value is hidden wherever a piece or a cut divides it.
// The package never decides whether a workload runs, nor which of its values are secret.
package output
