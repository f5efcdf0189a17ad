package collect

import (
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/recovery/drift"
)

// recoveryWay is the way of an attempt with a recovery token.
const recoveryWay = "recovery"

// topicJoinState is the topic of an attempt with the join state of a copy: an attempt that is refused for something
// else must not hide it.
const topicJoinState = "join_state"

// blockedFor is how long an attempt that the policy refused counts. The policy may have changed by then. It is longer
// than the hour after which agents try again.
const blockedFor = 90 * time.Minute

// attempted keeps what an attempt to enrol is evidence of: a recovery token that is refused for its age, or because it
// has ended or is not recorded, cannot bring the node back, and neither can one while the policy leaves recovery to
// operators. One that comes with an older join state than the node has confirmed is of a copy, or of a host whose disk
// was put back: its caller has proven to hold the node's recovery key. A host that has no token says so with
// the key of its expired certificate. Every other refusal says nothing about the token, and a claim that is not proven
// nothing about the node.
func (n *Node) attempted(a *recoveryv1.EnrollmentAttempted, at time.Time, correlation string) {
	if a.GetOutcome() == commonv1.Reason_REASON_UNSPECIFIED {
		n.enrolled(at, correlation)
		return
	}
	if a.GetWay() != recoveryWay || a.GetUnverified() {
		return
	}
	e := drift.Evidence{
		NodeID: n.NodeID, Part: commonv1.DriftPart_DRIFT_PART_CERTIFICATE, Source: drift.FromEnrolment, ObservedAt: at,
		Detail: names.Of(a.GetOutcome()), CorrelationID: correlation,
	}
	topic := ""
	switch a.GetOutcome() {
	case commonv1.Reason_REASON_TOKEN_EXPIRED, commonv1.Reason_REASON_TOKEN_CONSUMED,
		commonv1.Reason_REASON_TOKEN_INVALID:
		e.Reason = commonv1.DriftReason_DRIFT_REASON_RECOVERY_TOKEN_MISSING
		e.FreshUntil = n.settings.refusedUntil(at)
	case commonv1.Reason_REASON_RECOVERY_TOKEN_MISSING:
		e.Reason = commonv1.DriftReason_DRIFT_REASON_RECOVERY_TOKEN_MISSING
		e.FreshUntil = n.settings.refusedUntil(at)
		e.Detail = "the host says that it has no recovery token to send"
		if a.GetKeyLost() {
			e.Detail = "the host says that it has lost its recovery key, without which its recovery token proves nothing"
		}
	case commonv1.Reason_REASON_AUTO_RECOVERY_OFF:
		e.Reason = commonv1.DriftReason_DRIFT_REASON_RECOVERY_ENROLLMENT_BLOCKED
		e.FreshUntil = at.Add(blockedFor)
	case commonv1.Reason_REASON_CLONED_IDENTITY_DETECTED:
		e.Reason, topic = commonv1.DriftReason_DRIFT_REASON_CLONED_IDENTITY_DETECTED, topicJoinState
		e.Detail = "a recovery token was presented with an older join state than the node has confirmed: by a copy, or by " +
			"a host whose disk was put back"
	default:
		return
	}
	n.noteOf(topic, e, 0)
}

// enrolled keeps that the node has a certificate with which it can connect: what was refused before is over.
func (n *Node) enrolled(at time.Time, correlation string) {
	well := drift.Evidence{
		NodeID: n.NodeID, Part: commonv1.DriftPart_DRIFT_PART_CERTIFICATE, Source: drift.FromEnrolment, ObservedAt: at,
		CorrelationID: correlation,
	}
	if reason, _ := n.has(well.Part, well.Source); reason != 0 {
		n.note(well, 0)
	}
	n.NoteTopic(topicWayBack, well)
	n.NoteTopic(topicJoinState, well)
}
