package identity

import (
	"slices"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// RoleSecurity is the role that may lift a fence.
const RoleSecurity = "security"

// The alarms that an identity may have until a person has decided.
const (
	AlarmNone       = ""
	AlarmClone      = "cloned_identity_detected"
	AlarmJoinState  = "join_state_lost"
	AlarmTokenReuse = "token_reuse"
)

// Transition returns the state to which a verb leads from a state. roles are the roles of the person who requests it;
// the system's own holds have none. A request for the state that the node is in is refused as a conflict that names the
// state, and never accepted silently, since each accepted verb draws a fence.
func Transition(from commonv1.NodeIdentityState, verb recoveryv1.IdentityVerb,
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
	if from == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED &&
		verb == recoveryv1.IdentityVerb_IDENTITY_VERB_REACTIVATE &&
		!slices.Contains(roles, RoleSecurity) {
		return from, fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "lifting a fence needs the security role")
	}
	if !slices.Contains(sources(verb), from) {
		return from, fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
			"the identity is "+names.Of(from)+": "+names.Of(verb)+" does not apply",
			fault.Unmet("the identity is "+names.Of(from)+", and not one of: "+list(sources(verb))))
	}
	return to, nil
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
