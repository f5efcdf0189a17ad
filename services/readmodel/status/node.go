package status

import (
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/services/readmodel/project"
)

// Reasons why a node is not normal, in addition to those of the enum of refusals. Explain has a row for each.
const (
	ReasonDisconnected    = "disconnected" // not connected, and for less than StaleAfter
	ReasonAgentDown       = "agent_down"
	ReasonOutage          = "control_plane_outage"
	ReasonCloned          = "cloned_identity_detected"
	ReasonTokenReuse      = "token_reuse"
	ReasonJoinStateLost   = "join_state_lost"
	ReasonHeld            = "identity_held"
	ReasonRevokedOrFenced = "identity_revoked_or_fenced"
	ReasonNodeNotAdmitted = "node_not_admitted"
	ReasonDiskFull        = "node_disk_full"
)

// NodeFacts are the facts from which a node's status is derived.
type NodeFacts struct {
	Identity *recoveryv1.NodeIdentity
	Gate     *lifecyclev1.NodeGate
	Session  *nodev1.SessionChanged // the one that serves it, else the newest; nil: none was ever opened
	BeatAt   time.Time              // of that session's replica; zero: it never beat
	// Connected: the session serves and its replica's beat is fresh.
	Connected bool
	// Since is the time from which on the session serves, or does not serve, according to the event log.
	Since time.Time
	// ListeningSince is the time since which replicas of nodeapi have been listening without a gap; zero: none listens.
	ListeningSince time.Time
	// StaleAfter is how long a node must be silent before it is reported as agent_down.
	StaleAfter time.Duration
}

// NodeStatus is a node's status as people see it.
type NodeStatus struct {
	UserState     commonv1.UserState
	Reason        string // empty if normal
	NextAction    string
	LastHeartbeat time.Time // zero: never heard
	Since         time.Time // of Connected as it is
}

// Describe returns the status that the facts support. It looks first at decisions about the identity, then at an outage
// of nodeapi, then at the connection, then the gate.
//
// A pending node has not enrolled yet, which is no failure, so it is normal. A node that was heard from a moment ago
// and has no session is `disconnected`, which is an observation and no verdict. Only a node that is silent for longer
// than StaleAfter, counted from when a replica listened, or an active one that has never opened a session, is
// `agent_down`. If no replica listens, the silence is the control plane's outage and not the node's.
func Describe(f NodeFacts, now time.Time) NodeStatus {
	s := NodeStatus{LastHeartbeat: lastHeartbeat(f), Since: since(f)}
	if state, reason, next, ok := describeIdentity(f.Identity); ok {
		s.UserState, s.Reason, s.NextAction = state, reason, next
		return s
	}
	switch {
	case f.Connected && f.Gate.GetAdmitted() && f.Gate.GetHost().GetStateDisk().GetFull():
		s.UserState, s.Reason = commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED, ReasonDiskFull
		s.NextAction = "free room on its disk, in " + f.Gate.GetHost().GetStateDisk().GetPath() + ": " +
			f.Gate.GetHost().GetStateDisk().GetDetail()
	case f.Connected && f.Gate.GetAdmitted():
		s.UserState = commonv1.UserState_USER_STATE_NORMAL
	case f.Connected:
		s.UserState, s.Reason = commonv1.UserState_USER_STATE_TEMPORARY, ReasonNodeNotAdmitted
		s.NextAction = "wait: lifecycle has yet to open its gate"
	case f.ListeningSince.IsZero():
		s.UserState, s.Reason = commonv1.UserState_USER_STATE_TEMPORARY, ReasonOutage
		s.NextAction = "none at the node: no replica of nodeapi listens; restore the control plane"
	case f.Session != nil && now.Before(staleAt(f, s.LastHeartbeat)):
		s.UserState, s.Reason = commonv1.UserState_USER_STATE_TEMPORARY, ReasonDisconnected
		s.NextAction = "wait: the agent connects again by itself"
	default:
		s.UserState, s.Reason = commonv1.UserState_USER_STATE_TEMPORARY, ReasonAgentDown
		s.NextAction = "wait for the agent; if it stays away, restart it on its host"
	}
	return s
}

// describeIdentity returns the user state, the reason and the next action that follow from an identity's state alone,
// and whether any do.
func describeIdentity(i *recoveryv1.NodeIdentity) (commonv1.UserState, string, string, bool) {
	const (
		operator = commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED
		security = commonv1.UserState_USER_STATE_SECURITY_ACTION_REQUIRED
	)
	state := i.GetState()
	if state != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED {
		switch i.GetAlarm() {
		case ReasonCloned:
			return security, ReasonCloned, "fence the node, find the second copy, and give the machine a new identity", true
		case ReasonTokenReuse:
			return security, ReasonTokenReuse, "fence the node: its enrolment token was used with two keys", true
		}
	}
	switch state { //nolint:exhaustive // active goes on to the connection
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD:
		if i.GetAlarm() == ReasonJoinStateLost {
			return operator, ReasonJoinStateLost, "let the node recover, or issue a bundle", true
		}
		return operator, ReasonHeld, "look at the reason of the hold, then reactivate, quarantine or fence", true
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED:
		return operator, ReasonRevokedOrFenced, "reactivate the node, or enrol it again", true
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED:
		return operator, ReasonRevokedOrFenced, "reactivate with the security role, or enrol it again", true
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED:
		return operator, ReasonRevokedOrFenced, "none: this identity is final; enrol the machine anew if it is to return",
			true
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_PENDING,
		commonv1.NodeIdentityState_NODE_IDENTITY_STATE_UNSPECIFIED:
		return commonv1.UserState_USER_STATE_NORMAL, "", "enrol the machine with its bundle", true
	}
	return 0, "", "", false
}

// lastHeartbeat returns when the node was last known to be connected. While it is connected, the beat of its replica
// counts as well.
func lastHeartbeat(f NodeFacts) time.Time {
	var at time.Time
	if f.Session != nil && f.Session.GetLastSeenAt() != nil {
		at = f.Session.GetLastSeenAt().AsTime()
	}
	if f.Connected && f.BeatAt.After(at) {
		at = f.BeatAt
	}
	return at
}

// staleAt returns when a silent node becomes stale. The time in which no replica listened does not count.
func staleAt(f NodeFacts, heard time.Time) time.Time {
	from := heard
	if f.ListeningSince.After(from) {
		from = f.ListeningSince
	}
	return from.Add(f.StaleAfter)
}

// since returns when Connected got its present value, by the best evidence that the facts have.
func since(f NodeFacts) time.Time {
	switch {
	case f.Connected:
		return f.Since
	case f.Session == nil && f.Identity.GetStateAt() != nil:
		return f.Identity.GetStateAt().AsTime() // it has not connected since it got this state
	case f.Session == nil && f.Identity.GetCreatedAt() != nil:
		return f.Identity.GetCreatedAt().AsTime()
	case f.Session.GetClosedAt() != nil:
		return f.Session.GetClosedAt().AsTime()
	case project.Serving(f.Session) && !f.BeatAt.IsZero():
		return f.BeatAt // its replica stopped beating
	default:
		return f.Since
	}
}
