package collect

import (
	"time"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// GateGrace is how long a gate may be closed before that counts: it opens a moment after a session is admitted.
const GateGrace = 5 * time.Second

// opened keeps with which certificate the session that serves the node was opened. A probe is asked for anew in each
// session.
func (n *Node) opened(s *nodev1.SessionChanged) {
	if n.SerialGeneration != s.GetGeneration() {
		n.ProbeAttempt, n.ProbeNote = 0, ""
	}
	n.SessionSerial, n.SerialGeneration = s.GetSerial(), s.GetGeneration()
}

// matched reports whether the session was opened with the current certificate.
func (r NodeRow) matched() bool {
	return r.Serial != "" && r.SessionSerial == r.Serial && r.SerialGeneration == r.Generation
}

// mismatched has the node judged a moment after the given time if its session is not on the current certificate any
// more: the session on the next one is admitted right after that has become the current one.
func (n *Node) mismatched(at time.Time) {
	if n.matched() || !n.Stored.matched() || n.ReplicaID == "" {
		return
	}
	if at = at.Add(GateGrace); n.DueAt == nil || at.Before(*n.DueAt) {
		n.DueAt = &at
	}
}

// proofChanged reports whether there is news of what proves the node healthy: its session is on the current certificate
// now, or another one issued that. A session that ends is no such news.
func (n *Node) proofChanged() bool {
	return n.matched() && (!n.Stored.matched() || n.Serial != n.Stored.Serial) ||
		n.Issuer != n.Stored.Issuer && n.Stored.Issuer != ""
}
