// Package attempts owns whether this host may recover its identity by itself now, and the counts of what its attempts
// came to.
//
// It believes the policy that the control plane sent last, and the monotonic clock; between two runs of the agent it
// must believe the host's wall clock. It never sends anything and touches no identity (packages enrol and identity do).
//
// Guarantees. An attempt is on disk before Begin allows it, so that restarts allow no more of them. No hour of the
// monotonic clock has more than the policy's number of attempts that reached a server; a wall clock that was set back
// between two runs makes earlier attempts count for an hour from then on, at most. After the certificate that an
// attempt brought was refused in turn, no attempt is allowed until a session is admitted, the host is enrolled by an
// operator, or that certificate has ended.
package attempts
