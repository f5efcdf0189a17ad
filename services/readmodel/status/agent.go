package status

import (
	"fmt"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// ReasonRegisterFailing is the reason of a workspace whose agent is refused when it registers.
const ReasonRegisterFailing = "register_failing"

// AgentStatus is what is known of the agent that acts for a workspace.
type AgentStatus struct {
	Connected bool
	Since     time.Time // of Connected as it is; zero: not known
	Reason    string    // why it cannot act; empty if it can
	Detail    string    // the reason in words
}

// DescribeAgent returns whether a node's agent can act, and if not, why: it must be connected, its gate must be open,
// and its identity must not be on hold, quarantined, fenced or retired. A silent agent is never taken for a dead
// workload, because a disconnected agent reports nothing about its workloads.
func DescribeAgent(f NodeFacts, now time.Time) AgentStatus {
	const workload = "; the workload may well run"
	node := Describe(f, now)
	a := AgentStatus{Connected: f.Connected, Since: node.Since, Reason: node.Reason}
	if a.Since.Unix() <= 0 {
		a.Since = time.Time{}
	}
	switch state := f.Identity.GetState(); state { //nolint:exhaustive // the others leave it to the connection
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD, commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED,
		commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED, commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED:
		a.Detail = "the agent may not act: its identity is " + names.Of(state)
		if at := f.Identity.GetStateAt(); at != nil {
			a.Detail += sinceText(at.AsTime())
		}
		a.Detail += workload
		return a
	}
	switch {
	case f.Connected && f.Gate.GetAdmitted():
		a.Reason = "" // an alarm on an active identity does not stop the agent
	case f.Connected:
		a.Reason, a.Detail = ReasonNodeNotAdmitted,
			"the agent is connected, and nothing is offered to it until lifecycle opens its gate"+workload
	case f.ListeningSince.IsZero():
		a.Reason, a.Detail = ReasonOutage,
			"no replica of nodeapi listens, so nothing is heard of the agent"+sinceText(a.Since)+workload
	default:
		if a.Reason != ReasonAgentDown {
			a.Reason = ReasonDisconnected
		}
		a.Detail = "the agent cannot be reached" + sinceText(a.Since) + workload
	}
	return a
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
