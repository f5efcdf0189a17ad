package roster

import (
	"slices"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
)

// OnAuthority applies recovery's decision about a node to its sessions here. It does not block.
func (r *Roster) OnAuthority(n *recoveryv1.NodeAuthority) {
	r.mu.Lock()
	sessions := slices.Clone(r.byNode[n.GetNodeId()])
	r.mu.Unlock()
	for _, s := range sessions {
		r.applyAuthority(s, n)
	}
}

func (r *Roster) applyAuthority(s *Session, n *recoveryv1.NodeAuthority) {
	if d := stateDenial(n); d != nil {
		if failpoint.Hit("nodeapi.decision.before_close") == nil {
			s.Close(d)
		}
		return
	}
	gen, fence := s.numbers()
	// A decision with a later fence is from after the opening, whatever generation it leaves confirmed: none, after an
	// enrolment, or a reactivation that ended an alarm.
	ended := n.GetConfirmedSessionId() == "" && n.GetFenceEpoch() > fence
	if gen == 0 || (!ended && n.GetConfirmed() < gen) {
		// The session is not open yet, or the decision is from before it was confirmed: its instance and serials may be those
		// of an earlier session.
		return
	}
	if id := s.InstanceID(); id != "" && n.GetNodeInstanceId() != "" && id != n.GetNodeInstanceId() {
		s.Close(fault.ToDenial(fault.New(commonv1.Reason_REASON_SESSION_SUPERSEDED, "this node was enrolled anew"), ""))
		return
	}
	if ended || (n.GetConfirmedSessionId() == "" && (n.GetConfirmed() > gen || n.GetIssued() == gen)) {
		// A hold, quarantine or fence ended the session, and the node was reactivated before this replica heard of that. The
		// other decision that leaves no session confirmed, a rollback's adoption, issues the next generation with it, whose
		// session replaces this one.
		s.Close(fault.ToDenial(fault.New(commonv1.Reason_REASON_SESSION_UNKNOWN,
			"a decision about this node ended the session: open another one", fault.RetryAfter(100*time.Millisecond)), ""))
		return
	}
	if n.GetConfirmed() > gen && n.GetConfirmedSessionId() != s.ID &&
		s.State() == commonv1.SessionState_SESSION_STATE_ADMITTED {
		r.replace(s, n.GetReplacedNonce())
		return
	}
	serial := s.Identity.Serial
	if s.State() == commonv1.SessionState_SESSION_STATE_ADMITTED && serial != n.GetCurrentSerial() &&
		serial != n.GetNextSerial() {
		s.Close(fault.ToDenial(fault.New(commonv1.Reason_REASON_SERIAL_SUPERSEDED,
			"this certificate does not count any more"), ""))
	}
}

// stateDenial returns the denial with which a session of such a node is closed; nil for a node that may have a session.
func stateDenial(n *recoveryv1.NodeAuthority) *commonv1.Denial {
	switch n.GetState() {
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD:
		return fault.ToDenial(fault.New(commonv1.Reason_REASON_IDENTITY_HELD, "this node is held"), "")
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED:
		return fault.ToDenial(fault.New(commonv1.Reason_REASON_IDENTITY_QUARANTINED, "this node is quarantined"), "")
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED:
		return fault.ToDenial(fault.New(commonv1.Reason_REASON_IDENTITY_REVOKED_OR_FENCED, "this node is fenced"), "")
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED:
		if n.GetLaunched() {
			// Recovery knows whether a later epoch has the instance's workspace, and reports that the instance was still alive.
			// The agent is told to open a session, which asks recovery.
			return fault.ToDenial(fault.New(commonv1.Reason_REASON_SESSION_UNKNOWN,
				"this instance was retired: open a session to learn why", fault.RetryAfter(100*time.Millisecond)), "")
		}
		return fault.ToDenial(fault.New(commonv1.Reason_REASON_IDENTITY_RETIRED, "this node is retired"), "")
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE, commonv1.NodeIdentityState_NODE_IDENTITY_STATE_PENDING:
		return nil
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_UNSPECIFIED:
		return fault.ToDenial(fault.New(commonv1.Reason_REASON_RECORD_UNREADABLE, ""), "")
	default: // a state of a newer build
		return fault.ToDenial(fault.New(commonv1.Reason_REASON_RECORD_UNREADABLE, ""), "")
	}
}
