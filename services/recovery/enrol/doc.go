// Package enrol owns how a machine comes to a certificate: bootstrap tokens of operators, launch secrets of instances, and renewal over a session.
//
// It believes a token only by its hash, a key only by the signature of its request, and time only by the database. It never lets the
// authority's own one-time tokens carry the promise: they are burnt before they are verified and before their answer arrives. The promise is a
// row here, and it is one effect, not one request.
//
//	signature ─► audience ─► database time ─► proof ─► node state ─► generation ─► claim, 10 s ─► sign ─► store ─► answer
//	└──────── nothing is changed before the proof ────────┘
//
// Guarantees: one signing per (node, key) whose answer was stored, and the same key is given the same certificate again; another key with a
// valid proof is refused and, for an operator's token, revokes it and raises an alarm; one enrolment per node is in flight; a certificate that was
// signed and not stored is never accepted. An instance of a lower epoch is told to stop, one of the present epoch to wait.
package enrol
