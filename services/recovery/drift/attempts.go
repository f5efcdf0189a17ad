package drift

import (
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// recoveryWay is the way of an attempt with a recovery token.
const recoveryWay = "recovery"

// attempted keeps what an attempt to enrol is evidence of: a recovery token that is refused for its age, or because it
// has ended or is not recorded, cannot bring the node back. Every other refusal says nothing about the token.
func (n *node) attempted(a *recoveryv1.EnrollmentAttempted, at time.Time, correlation string) {
	switch a.GetOutcome() {
	case commonv1.Reason_REASON_UNSPECIFIED:
		n.enrolled(at, correlation)
	case commonv1.Reason_REASON_TOKEN_EXPIRED, commonv1.Reason_REASON_TOKEN_CONSUMED,
		commonv1.Reason_REASON_TOKEN_INVALID:
		if a.GetWay() != recoveryWay {
			return
		}
		n.note(Evidence{
			NodeID: n.NodeID, Part: commonv1.DriftPart_DRIFT_PART_CERTIFICATE, Source: attempts, ObservedAt: at,
			Reason: commonv1.DriftReason_DRIFT_REASON_RECOVERY_TOKEN_MISSING, Detail: names.Of(a.GetOutcome()),
			CorrelationID: correlation,
		}, 0)
	default:
	}
}

// enrolled keeps that the node has a certificate with which it can connect: what was refused before is over.
func (n *node) enrolled(at time.Time, correlation string) {
	if reason, known := n.has(commonv1.DriftPart_DRIFT_PART_CERTIFICATE, attempts); !known || reason == 0 {
		return
	}
	n.note(Evidence{
		NodeID: n.NodeID, Part: commonv1.DriftPart_DRIFT_PART_CERTIFICATE, Source: attempts, ObservedAt: at,
		CorrelationID: correlation,
	}, 0)
}
