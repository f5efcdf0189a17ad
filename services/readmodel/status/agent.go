package status

import (
	"fmt"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// ReasonRegisterFailing is the reason of a workspace whose agent is refused when it registers.
const ReasonRegisterFailing = "register_failing"

var notAdmitted = names.Of(commonv1.DriftReason_DRIFT_REASON_NODE_NOT_ADMITTED)

// AgentStatus is what is known of the agent that acts for a workspace.
type AgentStatus struct {
	Connected bool
	Since     time.Time // of Connected as it is; zero: not known
	Reason    string    // why it cannot act; empty if it can
	Detail    string    // the reason in words
	// Judged is the reason of the verdict that holds for its node which touches what runs there most, for people of the
	// operator; unspecified: none holds.
	Judged commonv1.DriftReason
	// Ours are the reasons that are incidents of the fleet; of them those of fault.OursIfMany touch nothing.
	Ours []commonv1.DriftReason
}

// DescribeAgent returns whether a node's agent can act, and if not, why: it must be connected, its gate must be open,
// and its identity must not be on hold, quarantined, fenced or retired. Of why it is silent a workspace shows only
// whether recovery has given up waiting for it. A silent agent is never taken for a dead workload, because a
// disconnected agent reports nothing about its workloads.
func DescribeAgent(f NodeFacts) AgentStatus {
	const workload = "; the workload may well run"
	node, verdict := Describe(f), verdictOf(f)
	a := AgentStatus{
		Connected: f.Connected, Since: node.Since, Reason: node.Reason, Judged: Touching(verdict, f.Ours...), Ours: f.Ours,
	}
	if a.Since.Unix() <= 0 {
		a.Since = time.Time{}
	}
	switch {
	case mayNotAct(f.Identity):
		if verdict == nil || verdict != f.Verdict || ofSilence(verdict.GetReason()) {
			a.Reason = notAdmitted // recovery has not concluded yet why, and the identity's state is known
		}
		a.Detail = "the agent may not act: its identity is " + names.Of(f.Identity.GetState())
		if at := f.Identity.GetStateAt(); at != nil {
			a.Detail += sinceText(at.AsTime())
		}
	case f.Connected && (verdict == nil || f.Gate.GetAdmitted()):
		a.Reason = "" // an alarm on an active identity does not stop the agent
		return a
	case f.Connected:
		a.Reason = notAdmitted // a finer reason is for people of the operator
		a.Detail = "the agent is connected, and nothing is offered to it until lifecycle opens its gate"
	case node.Reason == ReasonOutage:
		a.Detail = "no replica of nodeapi listens, so nothing is heard of the agent" + sinceText(a.Since)
	default:
		a.Reason = ReasonDisconnected
		switch verdict.GetReason() { //nolint:exhaustive // a finer reason is for people of the operator
		case commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN, commonv1.DriftReason_DRIFT_REASON_NODE_AGENT_UNREACHABLE:
			a.Reason = ReasonAgentDown
		}
		a.Detail = "the agent cannot be reached" + sinceText(a.Since)
	}
	a.Detail += workload
	return a
}

// mayNotAct reports whether an identity is in a state in which its agent gets no work.
func mayNotAct(i *recoveryv1.NodeIdentity) bool {
	switch i.GetState() { //nolint:exhaustive // the others leave it to the connection
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD, commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED,
		commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED, commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED:
		return true
	}
	return false
}

// sinceText returns " since TIME", or nothing if the time is not known.
func sinceText(at time.Time) string {
	if at.IsZero() {
		return ""
	}
	return " since " + at.UTC().Format(time.RFC3339)
}

// DescribeRegistering returns the reason and the detail for an agent that is refused when it registers.
func DescribeRegistering(w *lifecyclev1.Workspace) (string, string) {
	return ReasonRegisterFailing, fmt.Sprintf("the agent is refused as it registers (%d so far); the workload may "+
		"well run", w.GetRegisterFailures())
}
