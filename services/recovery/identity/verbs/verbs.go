// Package verbs decides which decisions about a node's identity a person may make: from which state a verb leads where,
// and which roles it needs. It reads and writes nothing.
package verbs

import (
	"slices"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// RoleSecurity is the role that may fence a node, lift a fence, and reactivate a node whose identity may be copied.
const RoleSecurity = "security"

// Transition returns the state to which a verb of a person leads from a state. copied is the alarm that says that two
// hosts may have the identity, empty if there is none; roles are the roles of the person. A request for the state that
// the node is in is refused as a conflict that names the state, and never accepted silently, since each accepted verb
// draws a fence.
func Transition(from commonv1.NodeIdentityState, copied string, verb recoveryv1.IdentityVerb,
	roles []string,
) (commonv1.NodeIdentityState, error) {
	to := verbTarget(verb)
	if to == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_UNSPECIFIED {
		return to, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "the verb is not one that changes an identity")
	}
	if from == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_UNSPECIFIED {
		return from, fault.New(commonv1.Reason_REASON_RECORD_UNREADABLE, "")
	}
	if from == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED {
		return from, fault.New(commonv1.Reason_REASON_IDENTITY_RETIRED, "")
	}
	if err := checkRole(from, copied, verb, roles); err != nil {
		return from, err
	}
	if !slices.Contains(sources(verb), from) {
		return from, fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
			"the identity is "+names.Of(from)+": "+names.Of(verb)+" does not apply",
			fault.Unmet("the identity is "+names.Of(from)+", and not one of: "+list(sources(verb))),
			fault.Remedy(afterRefusal(from, to)))
	}
	return to, nil
}

// afterRefusal returns the next action of a person whose verb does not apply to the state of the node's identity.
func afterRefusal(from, to commonv1.NodeIdentityState) string {
	switch from {
	case to:
		return "the identity is in that state already: nothing is to be done"
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_PENDING:
		return "the machine has not enrolled: run `gpuaas-node-agent enroll --bundle DIR` on it, or retire the node"
	default:
		return "the node is kept out of work already; `gpuaas nodes reactivate NODE --reason TEXT` lets it in again"
	}
}

// checkRole refuses a person without the security role what only that role may decide: a fence, the end of a fence, and
// the reactivation of a node whose identity two hosts may have.
func checkRole(from commonv1.NodeIdentityState, copied string, verb recoveryv1.IdentityVerb, roles []string) error {
	if slices.Contains(roles, RoleSecurity) {
		return nil
	}
	var what, next string
	switch {
	case verb == recoveryv1.IdentityVerb_IDENTITY_VERB_FENCE:
		what = "a fence needs the security role"
		next = "ask a person with the security role to fence the node; until then `gpuaas nodes quarantine NODE --reason " +
			"TEXT` keeps it out"
	case verb != recoveryv1.IdentityVerb_IDENTITY_VERB_REACTIVATE:
		return nil
	case copied != "":
		what = "two hosts may have the node's identity (" + copied + "): its reactivation needs the security role"
		next = "find the second host, and ask a person with the security role to reactivate the node: that ends the " +
			"certificates and tokens of both hosts, and a bundle gives the machine a new identity (`gpuaas nodes bundle " +
			"NODE --reason TEXT`); a node on hold gets one by `gpuaas nodes enroll --name NAME` too, on the wiped machine"
	case from == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED:
		what, next = "lifting a fence needs the security role", "ask a person with the security role to reactivate the node"
	default:
		return nil
	}
	return fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, what,
		fault.Unmet("it needs the role "+RoleSecurity+"; you have "+strings.Join(roles, ", ")), fault.Remedy(next))
}

func verbTarget(verb recoveryv1.IdentityVerb) commonv1.NodeIdentityState {
	switch verb {
	case recoveryv1.IdentityVerb_IDENTITY_VERB_HOLD:
		return commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD
	case recoveryv1.IdentityVerb_IDENTITY_VERB_QUARANTINE:
		return commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED
	case recoveryv1.IdentityVerb_IDENTITY_VERB_FENCE:
		return commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED
	case recoveryv1.IdentityVerb_IDENTITY_VERB_REACTIVATE:
		return commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE
	case recoveryv1.IdentityVerb_IDENTITY_VERB_RETIRE:
		return commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED
	case recoveryv1.IdentityVerb_IDENTITY_VERB_UNSPECIFIED:
		return commonv1.NodeIdentityState_NODE_IDENTITY_STATE_UNSPECIFIED
	default:
		return commonv1.NodeIdentityState_NODE_IDENTITY_STATE_UNSPECIFIED
	}
}

// sources are the states from which a verb may be asked. A fenced node gets into a milder state only by reactivation.
func sources(verb recoveryv1.IdentityVerb) []commonv1.NodeIdentityState {
	const (
		pending     = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_PENDING
		active      = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE
		held        = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD
		quarantined = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED
		fenced      = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED
	)
	switch verb {
	case recoveryv1.IdentityVerb_IDENTITY_VERB_HOLD:
		return []commonv1.NodeIdentityState{active}
	case recoveryv1.IdentityVerb_IDENTITY_VERB_QUARANTINE:
		return []commonv1.NodeIdentityState{active, held}
	case recoveryv1.IdentityVerb_IDENTITY_VERB_FENCE:
		return []commonv1.NodeIdentityState{active, held, quarantined}
	case recoveryv1.IdentityVerb_IDENTITY_VERB_REACTIVATE:
		return []commonv1.NodeIdentityState{held, quarantined, fenced}
	case recoveryv1.IdentityVerb_IDENTITY_VERB_RETIRE:
		return []commonv1.NodeIdentityState{pending, active, held, quarantined, fenced}
	case recoveryv1.IdentityVerb_IDENTITY_VERB_UNSPECIFIED:
		return nil
	default:
		return nil
	}
}

func list(states []commonv1.NodeIdentityState) string {
	spelled := make([]string, len(states))
	for i, s := range states {
		spelled[i] = names.Of(s)
	}
	return strings.Join(spelled, ", ")
}
