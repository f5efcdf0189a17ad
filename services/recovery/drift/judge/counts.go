package judge

import (
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/services/recovery/drift"
	"github.com/gpuaas/mesh/services/recovery/drift/collect"
)

// evidenceOf returns the evidence about a node that counts now, beside the reason of the present verdict, and when the
// node must be judged again without news. What the gate tells of a node that is down does not count: lifecycle knows it
// from the agent, and it would hide that the agent is silent.
func (t *takenNodes) evidenceOf(n *collect.Node, present commonv1.DriftReason) ([]drift.Evidence, *time.Time) {
	var again *time.Time
	earlier := func(at time.Time) {
		if again == nil || at.Before(*again) {
			again = &at
		}
	}
	served, down := time.Time{}, false
	for _, e := range n.Evidence {
		if e.Heard() && e.Reason == 0 {
			served = e.ObservedAt
		}
		down = down || e.Source == drift.FromSession && e.Reason == commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN
	}
	out := make([]drift.Evidence, 0, len(n.Evidence))
	for _, e := range n.Evidence {
		if e.Topic != "" && (e.Reason == 0 || e.Stale(t.seen.Now)) { // a topic that is well proves nothing
			continue
		}
		if e.Source == drift.FromGate && e.Reason != 0 {
			if down {
				continue
			}
			if from := t.gateCounts(n, &e.Evidence, served, present); t.seen.Now.Before(from) {
				earlier(from)
				continue
			}
		}
		if e.FreshUntil.After(t.seen.Now) {
			earlier(e.FreshUntil)
		}
		out = append(out, e.Evidence)
	}
	return out, again
}

// gateCounts returns from when evidence of the gate counts. That the gate is closed does not count for a moment after a
// session began to serve. While events are unread for long, what was read may be over for long: it begins no verdict,
// and ends none that it began before.
func (t *takenNodes) gateCounts(n *collect.Node, e *drift.Evidence, served time.Time, present commonv1.DriftReason,
) time.Time {
	closed := e.Reason == commonv1.DriftReason_DRIFT_REASON_NODE_NOT_ADMITTED
	if closed && n.ReplicaID == "" { // which proves nothing
		return time.Time{}
	}
	if e.Reason != present && t.seen.unread() > upToDate {
		return t.seen.Now.Add(collect.GateGrace)
	}
	if !closed {
		return time.Time{}
	}
	if served.After(e.ObservedAt) {
		return served.Add(collect.GateGrace)
	}
	return e.ObservedAt.Add(collect.GateGrace)
}
