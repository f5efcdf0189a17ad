package fault

import (
	"slices"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// OfCaller reports whether a reason is about what its caller asked for, or about a workload that the caller runs.
func OfCaller(reason commonv1.Reason) bool {
	return reason == commonv1.Reason_REASON_WORKLOAD_FAILED || reason == commonv1.Reason_REASON_WORKLOAD_CRASH_LOOP ||
		RowOf(reason).Owner == ownerCaller
}

// ForTenants reports whether a person of a tenant may see a reason: it is known, and about a request, a person, the
// policy or a workspace. Reasons of nodes, their agents and their tasks are for people of the operator.
func ForTenants(reason commonv1.Reason) bool {
	if slices.Contains(machines, reason) {
		return false
	}
	if _, err := names.Parse[commonv1.DriftReason](names.Of(reason)); err == nil {
		return false
	}
	for _, rows := range []map[commonv1.Reason]Row{requestRows, peopleRows, policyRows, workspaceRows} {
		if _, ok := rows[reason]; ok {
			return true
		}
	}
	return false
}

// machines are the reasons of a workspace that are about the machine or the instance that it is on.
var machines = []commonv1.Reason{
	commonv1.Reason_REASON_NODE_DISK_FULL, commonv1.Reason_REASON_INSTANCE_OF_LOST_HISTORY,
}
