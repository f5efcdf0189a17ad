package fault

import (
	"time"

	"connectrpc.com/connect"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

var requestRows = map[commonv1.Reason]Row{
	commonv1.Reason_REASON_INVALID_ARGUMENT: {
		Code: connect.CodeInvalidArgument, Action: stop, Owner: ownerCaller,
		Public: "the request is not valid",
		Remedy: "correct the named field and send it again",
		Impact: "only this request: nothing was changed",
	},
	commonv1.Reason_REASON_AMBIGUOUS: {
		Code: connect.CodeInvalidArgument, Action: stop, Owner: ownerCaller,
		Public: "the name, or the part of an id, stands for more than one",
		Remedy: "give tenant/name, more digits or the whole id of one that is listed",
		Impact: "only this request: nothing was changed",
	},
	commonv1.Reason_REASON_NOT_FOUND: {
		Code: connect.CodeNotFound, Action: stop, Owner: ownerCaller,
		Public: "there is no such thing, or it is not yours to see",
		Remedy: "list what exists and use its id or name",
		Impact: "only this request: nothing was changed",
	},
	commonv1.Reason_REASON_ALREADY_EXISTS: {
		Code: connect.CodeAlreadyExists, Action: stop, Owner: ownerCaller,
		Public: "it exists already",
		Remedy: "use the one that exists, or choose another name",
		Impact: "only this request: nothing was changed",
	},
	commonv1.Reason_REASON_CONFLICT: {
		Code: connect.CodeAborted, Action: wait, RetryAfter: 100 * time.Millisecond, Owner: ownerCaller,
		Public: "it was changed by another request in the meantime",
		Remedy: "read it again and decide anew",
		Impact: "only this request: the other change stands",
	},
	commonv1.Reason_REASON_PRECONDITION_FAILED: {
		Code: connect.CodeFailedPrecondition, Action: stop, Owner: ownerCaller,
		Public: "a precondition does not hold",
		Remedy: "clear what is listed as standing in the way, then ask again",
		Impact: "only this request: nothing was changed",
	},
	commonv1.Reason_REASON_UNAUTHENTICATED: {
		Code: connect.CodeUnauthenticated, Action: stop, Owner: ownerCaller,
		Public: "the caller has not proved who it is",
		Remedy: "present a token that is known and has not ended: a person with the role security makes one with `gpuaas " +
			"people create NAME --role R`; " +
			"a service presents the certificate that this listener asks for",
		Impact: "only this caller",
	},
	commonv1.Reason_REASON_PERMISSION_DENIED: {
		Code: connect.CodePermissionDenied, Action: stop, Owner: ownerCaller,
		Public: "the caller may not do this",
		Remedy: "ask a person who has the role that it needs",
		Impact: "only this request; the attempt is audited",
	},
	commonv1.Reason_REASON_RATE_LIMITED: {
		Code: connect.CodeResourceExhausted, Action: wait, RetryAfter: 5 * time.Second, Owner: ownerCaller,
		Public: "too many requests from this caller",
		Remedy: "ask again after the given time, and less often",
		Impact: "this caller is slowed; others are not",
	},
	commonv1.Reason_REASON_OVERLOADED: {
		Code: connect.CodeResourceExhausted, Action: wait, RetryAfter: 2 * time.Second, Owner: ownerControl,
		Public: "the service has no room for more work now",
		Remedy: "ask again after the given time; add replicas if it stays",
		Impact: "new work waits; what runs goes on",
	},
	commonv1.Reason_REASON_UNAVAILABLE: {
		Code: connect.CodeUnavailable, Action: wait, RetryAfter: time.Second, Owner: ownerControl,
		Public: "a service that this needs cannot be reached now",
		Remedy: "ask again; `gpuaas status` shows which part is missing",
		Impact: "operations wait; running workloads go on",
	},
	commonv1.Reason_REASON_DEADLINE_EXCEEDED: {
		Code: connect.CodeDeadlineExceeded, Action: wait, RetryAfter: time.Second, Owner: ownerControl,
		Public: "no answer came in time; the request may or may not have taken effect",
		Remedy: "ask again with the same idempotency key",
		Impact: "this request's outcome is not known until it is asked again",
	},
	commonv1.Reason_REASON_INTERNAL: {
		Code: connect.CodeInternal, Action: wait, RetryAfter: 5 * time.Second, Owner: ownerControl,
		Public: "internal error",
		Remedy: "ask again; report the correlation id if it stays",
		Impact: "this request failed; its state is unchanged or will be reconciled",
	},
	commonv1.Reason_REASON_UNIMPLEMENTED: {
		Code: connect.CodeUnimplemented, Action: stop, Owner: ownerOperator,
		Public: "this version does not offer that",
		Remedy: "update the older side",
		Impact: "only what needs the missing method",
	},
	commonv1.Reason_REASON_FRAME_TOO_LARGE: {
		Code: connect.CodeResourceExhausted, Action: stop, Owner: ownerCaller,
		Public: "the message is larger than this listener accepts",
		Remedy: "send less at once; bulk data goes over its own connection",
		Impact: "the message was dropped and its stream closed",
	},
	commonv1.Reason_REASON_PROTOCOL_VIOLATION: {
		Code: connect.CodeInvalidArgument, Action: wait, RetryAfter: 30 * time.Second, Owner: ownerAgent,
		Public: "a message came that has no place at this point of the stream",
		Remedy: "reconnect; update the side whose version is older",
		Impact: "the stream is closed; the identity is untouched",
	},
	commonv1.Reason_REASON_REASON_REQUIRED: {
		Code: connect.CodeInvalidArgument, Action: stop, Owner: ownerCaller,
		Public: "this operation needs a reason in words",
		Remedy: "give one with --reason; it is written into the audit log",
		Impact: "only this request: nothing was changed",
	},
	commonv1.Reason_REASON_CANCELLED: {
		Code: connect.CodeCanceled, Action: stop, Owner: ownerCaller,
		Public: "the caller interrupted it",
		Remedy: "look at what it asked for: an operation that was accepted goes on",
		Impact: "only this request; an operation that was accepted goes on",
	},
	commonv1.Reason_REASON_ASSERTION_INVALID: {
		Code: connect.CodeUnauthenticated, Action: stop, Owner: ownerReadmodel,
		Public: "the signed assertion of the person is missing, stale, or for another request",
		Remedy: "send the command again, so that it is signed anew",
		Impact: "only this command: nothing was changed",
	},
}

var peopleRows = map[commonv1.Reason]Row{
	commonv1.Reason_REASON_ROLE_NOT_HELD: {
		Code: connect.CodePermissionDenied, Action: stop, Owner: ownerSecurity,
		Public: "a role is given only by a person whose own roles include it",
		Remedy: "ask a person who has the role security and one that includes the role: operator includes tenant and viewer",
		Impact: "only this request: no person was made; the attempt is audited",
	},
	commonv1.Reason_REASON_LAST_SECURITY_PERSON: {
		Code: connect.CodeFailedPrecondition, Action: stop, Owner: ownerSecurity,
		Public: "no other person with the role security remains for a day: without one, no person could make or end people",
		Remedy: "make another person with the role security first, for more than a day",
		Impact: "only this request: the person goes on; the attempt is audited",
	},
}

var policyRows = map[commonv1.Reason]Row{
	commonv1.Reason_REASON_POLICY_KEY_UNKNOWN: {
		Code: connect.CodeNotFound, Action: stop, Owner: ownerCaller,
		Public: "there is no policy key of that name",
		Remedy: "`gpuaas policy get` lists the keys",
		Impact: "only this request: no policy was changed",
	},
	commonv1.Reason_REASON_POLICY_VALUE_REFUSED: {
		Code: connect.CodeInvalidArgument, Action: stop, Owner: ownerCaller,
		Public: "the value is outside what this policy key allows",
		Remedy: "choose a value within the bounds",
		Impact: "only this request: no policy was changed",
	},
	commonv1.Reason_REASON_POLICY_WEAKENING_UNACKNOWLEDGED: {
		Code: connect.CodeFailedPrecondition, Action: stop, Owner: ownerOperator,
		Public: "the value weakens a budget of the failure matrix, or a limit of severity P0 or P1",
		Remedy: "tighten the value instead; or accept that it is weaker, which is audited with its reason: " +
			"`gpuaas policy set KEY VALUE --acknowledge-weakening --reason TEXT`",
		Impact: "only this request: no policy was changed",
	},
	commonv1.Reason_REASON_RESUME_TOKEN_EXPIRED: {
		Code: connect.CodeOutOfRange, Action: wait, Owner: ownerReadmodel,
		Public: "the watch cannot resume from that point any more",
		Remedy: "take a new snapshot and watch from it",
		Impact: "only this watch: its reader has to read everything once more",
	},
	commonv1.Reason_REASON_POSITION_NOT_REACHED: {
		Code: connect.CodeUnavailable, Action: wait, RetryAfter: 500 * time.Millisecond, Owner: ownerReadmodel,
		Public: "the projection has not come to the asked position in time",
		Remedy: "ask again; the command itself is done",
		Impact: "reads are late; nothing is lost",
	},
}
