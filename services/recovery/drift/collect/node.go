package collect

import (
	"slices"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/recovery/drift"
)

// Node is what is stored of one node, and what events and rounds change of it.
type Node struct {
	NodeRow
	Stored   NodeRow
	Evidence []*Kept
	Due      bool  // it must be judged at once
	Unread   error // some of its evidence is of a newer build

	// facts of its host, where events tell of them, and as they are stored; nil: there are none
	Facts, factsWere *factsRow

	// the profile that it reports, where events tell of one; and whether it differs from what is stored
	profile     *profileRow
	profileNews bool

	settings Settings

	Down, Lost bool      // it is silent for too long; the replica that served it is lost
	DownSince  time.Time // when it was heard last
}

// clockError is how far apart two readings of one moment by a replica's estimate of the database's clock may be.
const clockError = time.Second

// ActiveState is the state of an identity in which its node is expected to be connected.
var ActiveState = names.Of(commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE)

// note keeps evidence of a part as a whole, see noteOf.
func (n *Node) note(e drift.Evidence, version int64) { n.noteOf("", e, version) }

// noteOf keeps evidence of a topic of a part, in place of what its source saw of it before. The version is that of the
// source's row: what is older than the evidence that is kept is ignored. What a source goes on to see is kept as it
// was seen first, with the newest version: an event that was set aside and is read late takes nothing back.
func (n *Node) noteOf(topic string, e drift.Evidence, version int64) {
	for _, old := range n.Evidence {
		if !old.is(e.Part, e.Source, topic) {
			continue
		}
		if version >= old.version {
			old.version = version
			if !old.same(e) {
				old.Evidence = e
			}
		}
		return
	}
	n.Evidence = append(n.Evidence, &Kept{Evidence: e, Topic: topic, version: version})
}

// news reports whether there is evidence that is not stored yet.
func (n *Node) news() bool {
	return slices.ContainsFunc(n.Evidence, func(e *Kept) bool { return e.news() })
}

// has returns the reason that is kept for a part by a source, and whether there is any evidence of theirs.
func (n *Node) has(part commonv1.DriftPart, source commonv1.EvidenceSource) (commonv1.DriftReason, bool) {
	for _, e := range n.Evidence {
		if e.is(part, source, "") {
			return e.Reason, true
		}
	}
	return 0, false
}

// identityChanged keeps what the record of its identity is evidence of. A node that has just become active has had no
// chance to connect before: its silence counts from then on, and of one in any other state it does not count.
func (n *Node) identityChanged(i *recoveryv1.NodeIdentity, version int64, correlation string) {
	e := drift.OfIdentity(i)
	e.CorrelationID = correlation
	for _, old := range n.Evidence {
		if old.is(e.Part, e.Source, "") && version < old.version {
			return
		}
	}
	n.note(e, version)
	before := n.State
	n.State = names.Of(i.GetState())
	n.InstanceID, n.Serial, n.Issuer = i.GetNodeInstanceId(), i.GetCurrentSerial(), i.GetIssuerFingerprint()
	switch {
	case n.State != ActiveState:
		n.SilentSince = nil
	case before != ActiveState && n.ReplicaID == "":
		at := e.ObservedAt
		if n.SilentSince != nil && n.SilentSince.After(at) {
			at = *n.SilentSince
		}
		n.SilentSince = &at
		n.notServed(commonv1.DriftReason_DRIFT_REASON_DISCONNECTED, at, "it has not connected since it became active",
			correlation)
	}
}

// sessionChanged keeps whether a session serves the node. Only the newest session that was admitted counts: another
// that is opened and refused, as of a copy, ends nothing.
func (n *Node) sessionChanged(s *nodev1.SessionChanged, version int64, at time.Time, correlation string) {
	serving := !s.GetLate() && s.GetReplicaId() != "" &&
		(s.GetState() == commonv1.SessionState_SESSION_STATE_ADMITTED ||
			s.GetState() == commonv1.SessionState_SESSION_STATE_DRAINING)
	same := s.GetSessionId() == n.SessionID
	switch {
	case same && version <= n.SessionVersion, !same && (!serving || s.GetGeneration() < n.Generation):
		return
	}
	n.noteReported(s, serving, at, correlation)
	records := RecordsOf(s.GetDiagnostics())
	if serving {
		if !same || n.ReplicaID == "" { // it is heard again, and tells what kept it away
			n.hostOver(at)
			n.hostReported(records, at, at, correlation)
			records = nil
		}
		n.SessionID, n.Generation, n.SessionVersion = s.GetSessionId(), s.GetGeneration(), version
		n.ReplicaID, n.SilentSince = s.GetReplicaId(), nil
		n.opened(s)
		n.acceptedByIngress(at)
		n.note(drift.Evidence{
			NodeID: n.NodeID, Part: commonv1.DriftPart_DRIFT_PART_PROCESS, Source: drift.FromSession, ObservedAt: at,
			CorrelationID: correlation,
		}, 0)
		n.enrolled(at, correlation)
		n.hostReported(records, at, n.heardAt(), correlation)
		return
	}
	n.SessionVersion = version
	heardAt := n.lastHeard(s, at)
	if n.ReplicaID != "" { // what it told while it was heard
		n.hostReported(records, at, heardAt, correlation)
		n.hostHeard(heardAt)
	}
	if n.ReplicaID == "" && !n.heardSince(heardAt) { // it was late, or lost with its replica, and is closed now
		return
	}
	n.ReplicaID = ""
	if n.State == ActiveState {
		n.SilentSince = &heardAt
	}
	detail := names.OfSet(s.GetCloseReason())
	if s.GetLate() {
		detail = "no heartbeat"
	}
	n.notServed(commonv1.DriftReason_DRIFT_REASON_DISCONNECTED, heardAt, detail, correlation)
}

// heardSince reports whether a node that no session serves was heard later than is kept, at the given time: its replica
// was lost and has come back, or a session that was late ends after another heartbeat.
func (n *Node) heardSince(heardAt time.Time) bool {
	for _, e := range n.Evidence {
		if e.Heard() {
			return e.Reason != 0 && heardAt.After(e.ObservedAt.Add(clockError))
		}
	}
	return false
}

// lastHeard returns when the agent was heard last in a session that serves no more. The replica has it by its estimate
// of the database's clock: it is taken as not after the event, and not before the node was seen to be served.
func (n *Node) lastHeard(s *nodev1.SessionChanged, at time.Time) time.Time {
	heardAt := at
	switch {
	case s.GetLastSeenAt() != nil:
		heardAt = s.GetLastSeenAt().AsTime()
	case s.GetClosedAt() != nil:
		heardAt = s.GetClosedAt().AsTime()
	}
	for _, e := range n.Evidence {
		if e.Heard() && e.Reason == 0 &&
			heardAt.Before(e.ObservedAt) {
			heardAt = e.ObservedAt
		}
	}
	if heardAt.After(at) {
		return at
	}
	return heardAt
}

// notServed keeps that no session serves the node.
func (n *Node) notServed(reason commonv1.DriftReason, since time.Time, detail, correlation string) {
	n.note(drift.Evidence{
		NodeID: n.NodeID, Part: commonv1.DriftPart_DRIFT_PART_PROCESS, Reason: reason, Source: drift.FromSession,
		ObservedAt: since,
		Detail:     detail, CorrelationID: correlation,
	}, 0)
}

// gateChanged keeps what lifecycle's gate is evidence of. That a part is well is worth a row only in place of another.
func (n *Node) gateChanged(g *lifecyclev1.NodeGate, version int64, at time.Time, correlation string) {
	for _, e := range drift.OfGate(g, at) {
		if _, known := n.has(e.Part, e.Source); e.Reason == 0 && !known {
			continue
		}
		e.CorrelationID = correlation
		n.note(e, version)
	}
}

// NoteSilent keeps that the node was not heard for too long.
func (n *Node) NoteSilent(since time.Time, detail string) {
	reason := commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN
	if n.State != ActiveState {
		reason = commonv1.DriftReason_DRIFT_REASON_DISCONNECTED
	}
	correlation := ""
	for _, e := range n.Evidence {
		if e.Heard() {
			correlation = e.CorrelationID
		}
	}
	if n.ReplicaID != "" {
		n.hostHeard(since)
	}
	n.ReplicaID, n.SilentSince = "", nil
	n.notServed(reason, since, detail, correlation)
}
