// Package wave keeps recovery from refusing a fleet for what recovery itself has lost.
//
// A node without a row, a certificate without a row and a join state that cannot be read are good reasons to refuse a node, or to put it on hold, when they
// come singly. Many at once are a fault of the control plane: a database of an earlier time, keys that differ between replicas. Recovery notes each node that
// it would refuse so, and above a share of the active nodes, and a least number, it tells all of them to wait. The watchdog engages the fleet brake over the
// same rows, with one incident. While the brake is engaged, for whatever cause, such nodes wait.
//
// It decides nothing over what recovery knows: a challenge that was answered with an old generation, a token that was used twice, a revoked certificate and
// what a person has decided are refused as ever.
//
// Guarantees: the nodes of one wave that are refused are at most as many as the limit allows, however many replicas decide at once; what it costs follows the
// number of nodes that would be refused, not that of the fleet; after a person's release only nodes that were not known by then count.
package wave
