// Package drill runs the rows of the failure matrix: each brings its part of a mesh to a known good state, injects a
// real fault, measures how long the API takes to report the fault and the mesh takes to recover, and judges both by the
// row's budgets.
//
// It owns a mesh of separate processes for as long as it runs, and no state inside them. It takes verdicts from the
// public API alone, and evidence of faults from the host alone: processes, signals, files, the launch log that the
// placement driver keeps for itself, a lock store's own counters. Whether a fault took effect is never read from the
// detector under test. It never uses SQL, never calls a service behind the API, and never makes a program simulate a
// fault.
//
// Guarantees: a drill whose fault did not take effect fails, and so does one with too little evidence. Each has two
// controls that must fail, each at its own stage: the fault withheld, and the detector mutated.
package drill
