// Package drill lists the drills, which are rows of the failure matrix, one file for each in a package for each kind of
// fault: each brings its part of a mesh to a known good state, injects a real fault, measures how long the API takes to
// report the fault and the mesh takes to recover, and judges both by the row's budgets. Package kit has what they are
// made of, and runs them.
//
// Drills take verdicts from the public API alone, and evidence of faults from the host alone: processes, signals,
// files, the launch log that the placement driver keeps for itself, a lock store's own counters. Whether a fault took
// effect is never read from the detector under test. Drills never use SQL, never call a service behind the API, and
// never make a program simulate a fault.
//
// Guarantees: a drill whose fault did not take effect fails, and so does one with too little evidence. Each has two
// controls that must fail, each at its own stage: the fault withheld, and the detector mutated. A drill leaves the mesh
// as it found it: one after which the mesh does not come to rest has failed. A scaled drill has a limit, and so have
// the steps together that put the mesh right.
//
// The tests run every drill. They run the controls of a drill that is Slow only with GPUAAS_TEST_LONG.
package drill
