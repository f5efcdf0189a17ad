package drift

import (
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// Evidence is one observation of a part of a node by one source. A later observation of the same part by the same
// source replaces it where evidence is stored. Classify takes all that it is given, and the worse of two pieces that
// contradict each other.
type Evidence struct {
	NodeID        string // empty: it is about the control plane, and so about every node
	Part          commonv1.DriftPart
	Reason        commonv1.DriftReason // unspecified: the part is well
	Source        commonv1.EvidenceSource
	ObservedAt    time.Time
	FreshUntil    time.Time // from then on it is stale; zero: never
	Detail        string    // for people, except that Classify reads the state of an identity in it (see OfIdentity)
	CorrelationID string
}

// Stale reports whether the evidence does not count any more.
func (e *Evidence) Stale(now time.Time) bool {
	return !e.FreshUntil.IsZero() && !now.Before(e.FreshUntil)
}

// What the evidence of an identity has as detail in the states that Classify tells apart.
const (
	DetailPending = "pending"
	DetailFenced  = "fenced"
	DetailRetired = "retired"
)

// OfIdentity returns the evidence that an identity's record is: a decision about the identity, or that it is well. An
// alarm of a retired identity does not count, for nothing follows from it any more.
func OfIdentity(i *recoveryv1.NodeIdentity) Evidence {
	e := Evidence{
		NodeID: i.GetNodeId(), Part: commonv1.DriftPart_DRIFT_PART_CERTIFICATE,
		Source:     commonv1.EvidenceSource_EVIDENCE_SOURCE_IDENTITY,
		ObservedAt: i.GetStateAt().AsTime(), Detail: names.Of(i.GetState()),
	}
	if i.GetStateAt() == nil {
		e.ObservedAt = i.GetCreatedAt().AsTime()
	}
	switch i.GetState() {
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED:
		e.Reason = commonv1.DriftReason_DRIFT_REASON_IDENTITY_REVOKED_OR_FENCED
		return e
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED,
		commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED:
		e.Reason = commonv1.DriftReason_DRIFT_REASON_IDENTITY_REVOKED_OR_FENCED
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD:
		e.Reason, e.Detail = commonv1.DriftReason_DRIFT_REASON_IDENTITY_HELD, i.GetStateReason()
		if i.GetAlarm() == joinStateLost {
			e.Reason = commonv1.DriftReason_DRIFT_REASON_JOIN_STATE_LOST
		}
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_UNSPECIFIED:
		e.Detail = DetailPending
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_PENDING, commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE:
	}
	switch i.GetAlarm() {
	case cloned:
		e.Reason, e.Detail = commonv1.DriftReason_DRIFT_REASON_CLONED_IDENTITY_DETECTED, i.GetStateReason()
	case tokenReuse:
		e.Reason, e.Detail = commonv1.DriftReason_DRIFT_REASON_TOKEN_REUSE, i.GetStateReason()
	}
	return e
}

// The spellings of the alarms of an identity.
var (
	cloned        = names.Of(commonv1.DriftReason_DRIFT_REASON_CLONED_IDENTITY_DETECTED)
	tokenReuse    = names.Of(commonv1.DriftReason_DRIFT_REASON_TOKEN_REUSE)
	joinStateLost = names.Of(commonv1.DriftReason_DRIFT_REASON_JOIN_STATE_LOST)
)

// OfGate returns the evidence that a gate is, observed at the given time: whether lifecycle admits work on the node,
// and whether the agent's disk has room.
func OfGate(g *lifecyclev1.NodeGate, at time.Time) [2]Evidence {
	tasks := Evidence{
		NodeID: g.GetNodeId(), Part: commonv1.DriftPart_DRIFT_PART_TASKS,
		Source: commonv1.EvidenceSource_EVIDENCE_SOURCE_GATE, ObservedAt: at,
	}
	if !g.GetAdmitted() {
		tasks.Reason = commonv1.DriftReason_DRIFT_REASON_NODE_NOT_ADMITTED
	}
	host := Evidence{
		NodeID: g.GetNodeId(), Part: commonv1.DriftPart_DRIFT_PART_HOST,
		Source: commonv1.EvidenceSource_EVIDENCE_SOURCE_GATE, ObservedAt: at,
	}
	if disk := g.GetHost().GetStateDisk(); disk.GetFull() {
		host.Reason = commonv1.DriftReason_DRIFT_REASON_NODE_DISK_FULL
		host.Detail = disk.GetPath() + ": " + disk.GetDetail()
	}
	return [2]Evidence{tasks, host}
}
