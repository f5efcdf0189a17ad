// Package kit runs drills: it brings a mesh to a known good state, has the fault injected and its effect proved,
// measures detection and recovery, and judges both by the budgets of the drill's row.
//
// It decides what a drill must show to pass, and that a control passes only if its drill fails at the stage at which it
// must. It knows no drill: package drill makes them from it. Packages below it have the parts: stage the stages, await
// the waits, host what the host shows, mesh the mesh, race the requests that are made at once, and restored a database
// that is put back to a copy.
//
// Guarantees: verdicts come from the public API alone; a fault whose effect was not proved fails the drill; a drill
// fails if anything changed that its fault is not about.
package kit
