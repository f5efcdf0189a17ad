package status

import (
	"cmp"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/readmodel/project"
)

// Reasons of which this package knows more than their names. Explain has a row for each.
const (
	ReasonDisconnected = "disconnected" // not connected: a fact, and no verdict
	ReasonAgentDown    = "agent_down"
	ReasonOutage       = "control_plane_outage"
)

// releaseOwner is by whom a node is cordoned while a release on it has failed.
const releaseOwner = "release"

// NodeFacts are the facts and the verdicts that a node's status shows.
type NodeFacts struct {
	Identity *recoveryv1.NodeIdentity
	Gate     *lifecyclev1.NodeGate
	Session  *nodev1.SessionChanged // the one that serves it, else the newest; nil: none was ever opened
	BeatAt   time.Time              // of that session's replica; zero: it never beat
	// Connected: the session serves and its replica's beat is fresh.
	Connected bool
	// Since is the time from which on the session serves, or does not serve, according to the event log.
	Since time.Time
	// Verdict is what recovery concludes about the node, and ControlPlane what it concludes about all nodes that are not
	// connected; nil: nothing yet.
	Verdict, ControlPlane *recoveryv1.NodeVerdict
	// Ours are the reasons that are an incident of the fleet now.
	Ours []commonv1.DriftReason
}

// NodeStatus is a node's status as people see it.
type NodeStatus struct {
	UserState     commonv1.UserState
	Reason        string // empty if normal, and for a node that has not enrolled yet
	NextAction    string
	LastHeartbeat time.Time // zero: never heard
	Since         time.Time // of Connected as it is
	// Verdict is the one that holds: the node's own, or that about the control plane. Nil: neither does.
	Verdict *recoveryv1.NodeVerdict
}

// Describe returns the verdict that holds for a node. If none does, the node shows the fact that it is connected, or
// that it is not. It concludes nothing from the time: how long a node may be silent is recovery's to judge.
//
// A pending node has not enrolled yet. An operator has to enrol a machine, and an instance enrols by itself. Nothing
// else concerns either: neither has had a session that could be missing.
func Describe(f NodeFacts) NodeStatus {
	s := NodeStatus{LastHeartbeat: lastHeartbeat(f), Since: since(f)}
	switch v := verdictOf(f); {
	case v != nil:
		s.Verdict = v
		s.UserState = cmp.Or(v.GetUserState(), commonv1.UserState_USER_STATE_TEMPORARY)
		s.Reason, s.NextAction = names.Of(v.GetReason()), v.GetNextAction()
	case f.Connected:
		s.UserState = commonv1.UserState_USER_STATE_NORMAL
	case pending(f.Identity):
		s.UserState, s.NextAction = unenrolled(f.Identity)
	default:
		s.UserState, s.Reason = commonv1.UserState_USER_STATE_TEMPORARY, ReasonDisconnected
		s.NextAction = fault.ExplainDrift(commonv1.DriftReason_DRIFT_REASON_DISCONNECTED).NextAction
	}
	// The node's silence is what a release waits for that has failed on it.
	failed := f.Gate.GetCordoned() && f.Gate.GetCordonedBy() == releaseOwner
	if failed && !f.Connected && (s.Reason == ReasonDisconnected || s.Reason == ReasonAgentDown) {
		s.NextAction += "; once it is back: `gpuaas allocations retry-release ALLOCATION` for each release that failed there"
	}
	return s
}

// verdictOf returns the verdict that holds for a node: its own, or that about the control plane if the node is not
// connected and its own says nothing of the identity or the host's trust; nil if neither names a reason. A verdict of
// silence on a node that is connected is older than the connection, and one on a closed gate holds for a node that is
// connected alone.
func verdictOf(f NodeFacts) *recoveryv1.NodeVerdict {
	own, all := f.Verdict, f.ControlPlane
	switch reason := own.GetReason(); {
	case reason == commonv1.DriftReason_DRIFT_REASON_UNSPECIFIED, f.Connected && ofSilence(reason),
		!f.Connected && reason == commonv1.DriftReason_DRIFT_REASON_NODE_NOT_ADMITTED:
		own = nil
	}
	if f.Connected || pending(f.Identity) || all.GetReason() == commonv1.DriftReason_DRIFT_REASON_UNSPECIFIED {
		return own
	}
	// What an agent that is not heard said of its disk is older than the outage.
	if own == nil || ofSilence(own.GetReason()) ||
		own.GetReason() == commonv1.DriftReason_DRIFT_REASON_NODE_DISK_FULL {
		return all
	}
	return own
}

// ofSilence reports whether a reason means no more than that nothing is heard of the agent, so that it does not hold
// once the agent is connected.
func ofSilence(reason commonv1.DriftReason) bool {
	switch reason { //nolint:exhaustive // the others say more
	case commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN, commonv1.DriftReason_DRIFT_REASON_DISCONNECTED,
		commonv1.DriftReason_DRIFT_REASON_NODE_AGENT_UNREACHABLE,
		commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_OUTAGE:
		return true
	}
	return false
}

// unenrolled returns the user state and the next action of a node that has not enrolled yet.
func unenrolled(i *recoveryv1.NodeIdentity) (commonv1.UserState, string) {
	switch {
	case i.GetState() == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_UNSPECIFIED:
		return commonv1.UserState_USER_STATE_TEMPORARY, "wait: its identity is not known here"
	case i.GetInstanceId() != "":
		return commonv1.UserState_USER_STATE_TEMPORARY, "wait: the instance enrols by itself once it runs"
	}
	return commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED, "enrol the machine with its bundle"
}

// pending reports whether a node has not enrolled yet, as far as is known.
func pending(i *recoveryv1.NodeIdentity) bool {
	return i.GetState() == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_PENDING ||
		i.GetState() == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_UNSPECIFIED
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
