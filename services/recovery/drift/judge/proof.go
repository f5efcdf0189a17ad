package judge

import (
	"time"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/services/recovery/drift"
	"github.com/gpuaas/mesh/services/recovery/drift/collect"
)

// proofOf returns what is known of the node, but for its replica and its issuer.
func proofOf(n *collect.Node, evidence []drift.Evidence) Proof {
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
func unproven(n *collect.Node) {
	n.ProbedAt, n.TasksAt, n.ProbeDue, n.Wanted, n.ProbeAttempt, n.ProbeNote = nil, nil, nil, false, 0, ""
}

// neverProbed reports whether no probe has completed in the node's enrolment, and none was made in its session.
func neverProbed(n *collect.Node) bool {
	return n.InstanceID != "" && n.ProbeInstance != n.InstanceID && n.ProbeAttempt == 0
}

// follow has the node probed if its reason has ended, or if no probe has completed in its enrolment, as soon as
// everything else is there. A node of which nothing was wrong since its probe is not probed again, however often it
// connects.
func follow(n *collect.Node, was *recoveryv1.NodeVerdict, v drift.Verdict, h health, now time.Time) {
	if v.Reason != 0 {
		return
	}
	probed := h.items[3].Present && h.items[4].Present
	n.Wanted = !probed && (n.Wanted || was.GetReason() != 0 || was.GetHealthySince() != nil && h.heard ||
		h.heard && neverProbed(n))
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
