// Package records has the commands about what the mesh recorded and noticed: the audit log, events and their consumers,
// incidents with the fleet brake, notifications, recoveries, findings, and the bundle for an escalation.
//
// A bundle gets its name only once it is whole: each of its files has the size and the hash of the manifest.
package records
