// Package enrol owns the ways in which a machine gets a certificate: bootstrap tokens of operators, launch secrets of
// instances, and renewal over a session.
//
// It accepts a token only by its hash, a key only by the signature of its request, and time only from the database. It
// does not rely on the authority's own one-time tokens for the guarantee of one signing: they are used up before they
// are verified and before their answer arrives. The guarantee is a row of recovery, and it holds for one effect, not
// one request.
//
//	signature ─► audience ─► database time ─► proof ─► node state ─► generation ─► claim, 10 s ─► sign ─► store ─► answer
//	└──────── nothing is changed before the proof ────────┘
//
// Guarantees: one signing per (node, key) whose answer was stored, and the same key is given the same certificate
// again; another key with a valid proof is refused and, for an operator's token, revokes it and raises an alarm; one
// enrolment per node is in flight; a certificate that was signed and not stored is never accepted. An instance of a
// lower epoch is told to stop, one of the present epoch to wait.
package enrol
