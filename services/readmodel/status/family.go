package status

import (
	"slices"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// Family is what a user is told of one of the five user states.
type Family struct {
	Text string // what it means, whether to wait, whom to ask
	// AskAgain is when a user may ask again for a recreation or a retry of a workspace whose node is in this state; zero:
	// at any time.
	AskAgain time.Duration
}

// families are never written after the process starts.
var families = map[commonv1.UserState]Family{
	commonv1.UserState_USER_STATE_NORMAL: {Text: "Nothing is known that disturbs it. There is nothing to do."},
	commonv1.UserState_USER_STATE_TEMPORARY: {
		Text: "Something disturbs it. If its own workload fails, correct that; anything else usually passes by itself: " +
			"wait some minutes, and ask your operator if it stays.",
	},
	commonv1.UserState_USER_STATE_RECOVERING: {
		Text: "It is being repaired automatically. Wait; ask your operator if it takes longer than half an hour.",
	},
	commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED: {
		Text: "It needs an operator. Wait, and ask your operator if it is urgent; `gpuaas workspaces actions` lists what " +
			"you can do meanwhile.",
		AskAgain: 5 * time.Minute,
	},
	commonv1.UserState_USER_STATE_SECURITY_ACTION_REQUIRED: {
		Text: "Security has to look at what it runs on. Put no secrets into it, wait, and ask your operator, who knows " +
			"when it can be used again.",
		AskAgain: 15 * time.Minute,
	},
}

// FamilyOf returns what a user is told of a user state. Of one that this build does not know it is to wait.
func FamilyOf(state commonv1.UserState) Family {
	if f, ok := families[state]; ok {
		return f
	}
	return Family{Text: "Its state is not known to this version. Wait, and ask your operator if it stays."}
}

// ActiveFamily returns the user state of an active workspace: that of a reason of its node's verdict, if the reason
// touches what runs there, or temporary, if there is evidence that its runtime fails; the graver one if both hold.
func ActiveFamily(reason commonv1.DriftReason, failing bool) commonv1.UserState {
	family := fault.ImpactOf(reason).Family
	if failing {
		return max(family, commonv1.UserState_USER_STATE_TEMPORARY)
	}
	return family
}

// Repair is a repair of a workspace's node by people, during which a user's request to recreate or retry it is told to
// wait. The zero value is none.
type Repair struct {
	State    commonv1.UserState
	AskAgain time.Duration
}

// RepairOf returns the repair that the user state of a workspace, as its node makes it, asks for.
func RepairOf(state commonv1.UserState) Repair {
	if wait := FamilyOf(state).AskAgain; wait > 0 {
		return Repair{State: state, AskAgain: wait}
	}
	return Repair{}
}

// Touching returns the reason of a verdict, or that of its evidence which touches what runs on the node more: a verdict
// is named after its gravest reason for the node, which may touch no workspace. A reason that is rather ours, because
// many machines of the fleet have it at once (fault.OursIfMany), touches none. It is unspecified for a verdict without
// a reason, and if nothing but such a reason is left.
func Touching(verdict *recoveryv1.NodeVerdict, ours ...commonv1.DriftReason) commonv1.DriftReason {
	worst := verdict.GetReason()
	if worst == commonv1.DriftReason_DRIFT_REASON_UNSPECIFIED {
		return worst
	}
	if isOurs(worst, ours) {
		worst = commonv1.DriftReason_DRIFT_REASON_UNSPECIFIED
	}
	for _, e := range verdict.GetEvidence() {
		if fault.ImpactOf(e.GetReason()).Family > fault.ImpactOf(worst).Family && !isOurs(e.GetReason(), ours) {
			worst = e.GetReason()
		}
	}
	return worst
}

// isOurs reports whether a reason touches nothing, because it is among those that are incidents of the fleet.
func isOurs(reason commonv1.DriftReason, ours []commonv1.DriftReason) bool {
	return fault.OursIfMany(reason) && slices.Contains(ours, reason)
}
