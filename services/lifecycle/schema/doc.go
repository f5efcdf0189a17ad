// Package schema makes and drops the schemas and login roles of workspaces in the workload database, each write fenced
// by the epoch and operation sequence of its writer, so that a driver that was too slow changes nothing.
package schema
