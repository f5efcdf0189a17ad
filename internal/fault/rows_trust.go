package fault

import (
	"time"

	"connectrpc.com/connect"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// trustRows are the refusals about profiles, bundles and the node authority.
var trustRows = map[commonv1.Reason]Row{
	commonv1.Reason_REASON_PROFILE_UNKNOWN: {
		Code: connect.CodeNotFound, Action: stop, Owner: ownerOperator,
		Public: "no profile has this name and version",
		Remedy: "`gpuaas profiles list` shows those that there are",
		Impact: "nothing changed; nodes keep the profile that they have",
	},
	commonv1.Reason_REASON_PROFILE_UNVERIFIED: {
		Code: connect.CodeFailedPrecondition, Action: stop, Owner: ownerOperator,
		Public: "an endpoint of the profile was not reached, or the profile's trust does not verify it",
		Remedy: "correct the endpoint or the trust bundle that is named, then ask again",
		Impact: "nothing changed; nodes keep the profile that they have",
	},
	commonv1.Reason_REASON_PROFILE_IN_USE: {
		Code: connect.CodeFailedPrecondition, Action: stop, Owner: ownerOperator,
		Public: "nodes report this version of the profile, or new nodes are given it",
		Remedy: "activate another version and wait until no node reports this one (`gpuaas profiles list`)",
		Impact: "nothing changed; the version stays valid",
	},
	commonv1.Reason_REASON_BUNDLE_INVALID: {
		Code: connect.CodeInvalidArgument, Action: rebundle, Owner: ownerOperator,
		Public: "the bundle is damaged, altered, not for this node, or has what no bundle has",
		Remedy: "issue another one with `gpuaas nodes bundle NODE`, and bring it to the host unchanged",
		Impact: "nothing on the host changed",
	},
	commonv1.Reason_REASON_AUTHORITY_ROTATION_UNDER_WAY: {
		Code: connect.CodeFailedPrecondition, Action: wait, RetryAfter: time.Minute, Owner: ownerControl,
		Public: "a rotation of the node authority is not through",
		Remedy: "wait until it is done (`gpuaas ca status`), or cancel it while it is announced",
		Impact: "nothing changed; the rotation goes on",
	},
}
