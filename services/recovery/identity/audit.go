package identity

import (
	"slices"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/pg"
)

const actionEnrol = "node.enrol"

// decision returns the name of the audit action that leads to a state.
func decision(state commonv1.NodeIdentityState) string {
	switch state {
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE:
		return "node.reactivate"
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD:
		return "node.hold"
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED:
		return "node.quarantine"
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED:
		return "node.fence"
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED:
		return "node.retire"
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_PENDING,
		commonv1.NodeIdentityState_NODE_IDENTITY_STATE_UNSPECIFIED:
	}
	return "node.change"
}

// decision returns the audit entry of the record's change of state.
func (r *Record) decision() audit.Entry {
	by := r.StateBy
	if slices.Contains(pg.ServiceRoles(), by) {
		by = "service/" + by
	}
	e := audit.Entry{
		Action: r.decided, Actor: by, Reason: r.StateReason, SubjectType: "node", SubjectID: r.NodeID, NodeID: r.NodeID,
		TenantID: r.TenantID, WorkspaceID: r.WorkspaceID,
		Details: map[string]any{"name": r.Name, "fence_epoch": r.FenceEpoch},
	}
	if r.Alarm != AlarmNone {
		e.Details["alarm"] = r.Alarm
	}
	if r.decided == actionEnrol {
		e.Details["node_instance_id"], e.Details["serial"] = r.InstanceID, r.NextSerial
	}
	if r.Epoch != 0 {
		e.Details["epoch"] = r.Epoch
	}
	return e
}
