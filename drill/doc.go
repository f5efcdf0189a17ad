// Package drill runs the rows of the failure matrix: each brings its part of a mesh to a known good state, injects a real fault, measures how long the API
// needs to say what is wrong and the mesh needs to be whole again, and judges both by the row's budgets.
//
// It owns a mesh of separate processes for as long as it runs, and nothing in it. It believes what people are told by the public API about verdicts, and only
// the host about faults: processes, signals, files, the ledger that the placement driver keeps for itself, a lock store's own counters. Whether a fault took
// is never read from what is to detect it. It never speaks SQL, never calls a service behind the API, and never asks a program to pretend.
//
// Guarantees: a drill whose fault did not take fails, and so does one that saw too little. Each has two controls that must fail, each at its own stage: the
// fault withheld, and the detector mutated.
package drill
