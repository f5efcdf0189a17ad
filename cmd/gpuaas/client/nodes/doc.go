// Package nodes has the commands about machines and the tasks of their agents: enrolment, identity, cordon and probe.
//
// The bundle of an enrolment contains a token, which is written into files that only their owner may read and is never
// printed. After a command the node is read again, so that the output has the effect of the command, or a note that it
// lacks it.
package nodes
