package drift

import (
	"time"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// opened keeps with which certificate the session that serves the node was opened. A probe is asked for anew in each
// session.
func (n *node) opened(s *nodev1.SessionChanged) {
	if n.SerialGeneration != s.GetGeneration() {
		n.ProbeAttempt, n.ProbeNote = 0, ""
	}
	n.SessionSerial, n.SerialGeneration = s.GetSerial(), s.GetGeneration()
}

// matched reports whether the session was opened with the current certificate.
func (r nodeRow) matched() bool {
	return r.Serial != "" && r.SessionSerial == r.Serial && r.SerialGeneration == r.Generation
}

// mismatched has the node judged a moment after the given time if its session is not on the current certificate any
// more: the session on the next one is admitted right after that has become the current one.
func (n *node) mismatched(at time.Time) {
	if n.matched() || !n.stored.matched() || n.ReplicaID == "" {
		return
	}
	if at = at.Add(settle); n.DueAt == nil || at.Before(*n.DueAt) {
		n.DueAt = &at
	}
}

// proofChanged reports whether there is news of what proves the node healthy: its session is on the current certificate
// now, or another one issued that. That it is not, for a moment, is none.
func (n *node) proofChanged() bool {
	return n.matched() && (!n.stored.matched() || n.Serial != n.stored.Serial) ||
		n.Issuer != n.stored.Issuer && n.stored.Issuer != ""
}

// proof returns what is known of the node, but for its replica and its issuer.
func (n *node) proof(evidence []Evidence) Proof {
	p := Proof{
		Evidence: evidence, Instance: n.InstanceID, Serial: n.Serial, Generation: n.Generation,
		ProbeInstance: n.ProbeInstance, ProbeGeneration: n.ProbeGeneration, Wanted: n.Wanted, Note: n.ProbeNote,
	}
	if n.SerialGeneration == n.Generation {
		p.SessionSerial = n.SessionSerial
	}
	if n.ProbedAt != nil {
		p.ProbedAt = *n.ProbedAt
	}
	if n.TasksAt != nil {
		p.TasksAt = *n.TasksAt
	}
	return p
}

// unproven forgets what proved the node healthy: a reason holds.
func (n *node) unproven() {
	n.ProbedAt, n.TasksAt, n.ProbeDue, n.Wanted, n.ProbeAttempt, n.ProbeNote = nil, nil, nil, false, 0, ""
}

// neverProbed reports whether no probe has completed in the node's enrolment, and none was made in its session.
func (n *node) neverProbed() bool {
	return n.InstanceID != "" && n.ProbeInstance != n.InstanceID && n.ProbeAttempt == 0
}

// follow has the node probed if its reason has ended, or if no probe has completed in its enrolment, as soon as
// everything else is there. A node of which nothing was wrong since its probe is not probed again, however often it
// connects.
func (n *node) follow(was *recoveryv1.NodeVerdict, v Verdict, h health, now time.Time) {
	if v.Reason != 0 {
		return
	}
	probed := h.items[3].Present && h.items[4].Present
	n.Wanted = !probed && (n.Wanted || was.GetReason() != 0 || was.GetHealthySince() != nil && h.heard ||
		h.heard && n.neverProbed())
	switch {
	case (n.Wanted || probed) && h.heard && !h.items[1].Present: // the preflight may succeed, or the authority answer
		if at := now.Add(unreadAgain); n.DueAt == nil || at.Before(*n.DueAt) {
			n.DueAt = &at
		}
		n.ProbeDue = nil
	case !n.Wanted || !h.ready:
		n.ProbeDue = nil
	case n.ProbeDue == nil:
		n.ProbeDue = &now
	}
}
