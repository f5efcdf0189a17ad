// Package controlplane has the commands about the mesh itself: its status, policy keys, reasons, signing keys,
// retention, the rollback mode, projections, and the contexts by which a person reaches it.
//
// Reasons and contexts need no connection, so that a refusal can be explained while the mesh cannot be reached.
package controlplane
