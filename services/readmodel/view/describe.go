package view

import (
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/services/readmodel/project"
)

// Reasons why a node is not normal, beside those of the enum of refusals. Explain has a row for each.
const (
	ReasonDisconnected    = "disconnected" // the fact, before it is old enough to be a verdict
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

// NodeFacts is all that is known of a node.
type NodeFacts struct {
	Identity *recoveryv1.NodeIdentity
	Gate     *lifecyclev1.NodeGate
	Session  *nodev1.SessionChanged // the one that serves it, else the newest; nil: none was ever opened
	BeatAt   time.Time              // of that session's replica; zero: it never beat
	// Connected: the session serves and its replica's beat is fresh.
	Connected bool
	// Since the session serves, or does not, as the log says.
	Since time.Time
	// ListeningSince is when the replicas that listen now began; zero: none listens.
	ListeningSince time.Time
	// StaleAfter is how old silence must be to count.
	StaleAfter time.Duration
}

// NodeStatus is what people are told of a node.
type NodeStatus struct {
	UserState     commonv1.UserState
	Reason        string // empty if normal
	NextAction    string
	LastHeartbeat time.Time // zero: never heard
	Since         time.Time // of Connected as it is
}

// Describe says what the facts allow, in the order of what matters most: decisions about the identity, then our own blindness, then the connection,
// then the gate.
//
// A pending node has given no evidence yet, which is none of failure: it is normal. A node that was heard a moment ago and has no session is
// `disconnected`, a fact and no verdict; only silence older than StaleAfter, counted from when somebody listened, is `agent_down`. If no replica
// listens, silence is ours.
func Describe(f NodeFacts, now time.Time) NodeStatus {
	s := NodeStatus{LastHeartbeat: lastHeartbeat(f), Since: since(f)}
	if state, reason, next, ok := describeIdentity(f.Identity); ok {
		s.UserState, s.Reason, s.NextAction = state, reason, next
		return s
	}
	switch {
	case f.Connected && f.Gate.GetAdmitted() && f.Gate.GetHost().GetStateDisk().GetFull():
		s.UserState, s.Reason = commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED, ReasonDiskFull
		s.NextAction = "free room on its disk, in " + f.Gate.GetHost().GetStateDisk().GetPath() + ": " + f.Gate.GetHost().GetStateDisk().GetDetail()
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

// describeIdentity returns what an identity's state decides alone.
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
		return operator, ReasonRevokedOrFenced, "none: this identity is final; enrol the machine anew if it is to return", true
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_PENDING, commonv1.NodeIdentityState_NODE_IDENTITY_STATE_UNSPECIFIED:
		return commonv1.UserState_USER_STATE_NORMAL, "", "enrol the machine with its bundle", true
	}
	return 0, "", "", false
}

// lastHeartbeat is when the node was last known to be there: while it is connected its replica speaks for it.
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

// staleAt is when silence begins to count: the absent have amnesty for the time in which nobody listened.
func staleAt(f NodeFacts, heard time.Time) time.Time {
	from := heard
	if f.ListeningSince.After(from) {
		from = f.ListeningSince
	}
	return from.Add(f.StaleAfter)
}

// since is when Connected became what it is, by the best evidence there is.
func since(f NodeFacts) time.Time {
	switch {
	case f.Connected:
		return f.Since
	case f.Session == nil && f.Identity.GetStateAt() != nil:
		return f.Identity.GetStateAt().AsTime() // never connected in this state
	case f.Session == nil && f.Identity.GetCreatedAt() != nil:
		return f.Identity.GetCreatedAt().AsTime()
	case f.Session.GetClosedAt() != nil:
		return f.Session.GetClosedAt().AsTime()
	case project.Serving(f.Session) && !f.BeatAt.IsZero():
		return f.BeatAt // its replica fell silent
	default:
		return f.Since
	}
}

// WorkspaceFacts is what a workspace's user state is made of.
type WorkspaceFacts struct {
	Workspace  *lifecyclev1.Workspace
	Stalled    bool        // the step of its run stalls: none of its attempts has succeeded since
	HasStalled bool        // an attempt of a step has, since the workspace last came up
	Agent      AgentStatus // of the node that the workspace names; zero if it names none
	Workloads  WorkloadStatus
}

// DescribeWorkspace returns the family that a workspace's user sees. Drift that touches neither runtime nor access leaves it normal. An agent that
// cannot act does touch it: nothing that is asked of the workspace is done meanwhile, though its workload may run on. While nobody of ours listens,
// the outage is ours and what runs is normal. A workload that fails is its tenant's to correct, and keeps its workspace from being normal. A workspace that has stalled on its way up is normal again when it has come up: that another attempt or another
// operation began is no evidence of anything.
func DescribeWorkspace(f WorkspaceFacts) commonv1.UserState {
	const cancelled = "cancel_requested"
	switch f.Workspace.GetState() {
	case commonv1.WorkspaceState_WORKSPACE_STATE_STUCK:
		return commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED
	case commonv1.WorkspaceState_WORKSPACE_STATE_FAILED:
		if f.Workspace.GetLastErrorCode() == cancelled {
			return commonv1.UserState_USER_STATE_NORMAL // it is what the user asked for
		}
		return commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED
	case commonv1.WorkspaceState_WORKSPACE_STATE_RECREATING:
		return commonv1.UserState_USER_STATE_RECOVERING
	case commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING, commonv1.WorkspaceState_WORKSPACE_STATE_CANCELLING,
		commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONING:
		if f.Stalled || f.HasStalled || f.Workspace.GetRegisterFailures() > 0 {
			return commonv1.UserState_USER_STATE_TEMPORARY
		}
	case commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE:
		if f.Agent.Reason != "" && f.Agent.Reason != ReasonOutage || f.Workloads.Failing {
			return commonv1.UserState_USER_STATE_TEMPORARY
		}
	case commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED,
		commonv1.WorkspaceState_WORKSPACE_STATE_UNSPECIFIED:
	}
	return commonv1.UserState_USER_STATE_NORMAL
}

// CurrentTask says whether a task is a current operation: it runs, or may still start. Whatever expired or ended is history.
func CurrentTask(t *lifecyclev1.Task, now time.Time) bool {
	switch t.GetState() { //nolint:exhaustive // the others have ended
	case commonv1.TaskState_TASK_STATE_RUNNING:
		return true
	case commonv1.TaskState_TASK_STATE_QUEUED, commonv1.TaskState_TASK_STATE_DISPATCHED, commonv1.TaskState_TASK_STATE_DELIVERED:
		return t.GetExpiresAt() == nil || t.GetExpiresAt().AsTime().After(now)
	default:
		return false
	}
}
