// Package ports picks free ports of this machine and reserves them.
//
// It trusts only a bind: a port is free if this process could listen on it a moment ago. A reservation holds for every
// process of the machine that picks by this package, and ends with the process that has it. The agent, which gives
// ports to workloads, and the servers of a mesh on one machine pick here alike, so that neither takes a port that the
// other waits to use: that is why the package is not part of devstack.
//
// Guarantees: a picked port is not the local end of another process's outgoing connection when its server starts later,
// or starts again.
package ports
