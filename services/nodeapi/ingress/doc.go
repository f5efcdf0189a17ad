// Package ingress reports which clients the agents' port refused in the handshake because of their certificate, as
// evidence for recovery. It decides nothing, and verifies nothing: what a refused certificate claims is unverified, and
// is marked so.
//
// Guarantees: a rejection costs a bounded time and a bounded memory, whatever is claimed, and never waits for the
// database. Of each claimed node and reason the first rejection is written as an event (`ingress.rejected`), and while
// more follow, at most one event in a minute, with when the first and the last were seen and their count. Claims of
// nodes that recovery does not know have a small part of the memory and of the events of their own, so that invented
// names push out no real one. What is pushed out is counted.
package ingress
