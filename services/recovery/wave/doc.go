// Package wave keeps recovery from refusing a whole fleet because of records that recovery itself has lost.
//
// A node without a row, a certificate without a row and a join state that cannot be read are good reasons to refuse a
// node, or to put it on hold, when they come singly. Many at once are a fault of the control plane: a database of an
// earlier time, keys that differ between replicas. Recovery records each node that it would refuse for such a reason.
// If they are more than a share of the active nodes, and more than a least number, it tells all of them to wait. The
// watchdog engages the fleet brake by the same rows, with one incident. While the brake is engaged, for any cause, such
// nodes wait.
//
// It does not change refusals that follow from records which recovery has: a challenge that was answered with an old
// generation, a token that was used twice, a revoked certificate, and a person's decision are refused in a wave as
// well.
//
// Guarantees: the nodes of one wave that are refused are at most as many as the limit allows, however many replicas
// decide at once; the cost depends on the number of nodes that would be refused, not on the size of the fleet; after a
// person's release of the brake only nodes that were not recorded before it count.
package wave
