package finding

import "github.com/gpuaas/mesh/internal/audit"

// decided returns the audit entry of a finding that was opened or resolved. A finding that is seen again has none.
func decided(action string, r Row) audit.Entry {
	return audit.Entry{
		Action: action, Reason: r.Summary, SubjectType: r.SubjectType, SubjectID: r.SubjectID, TenantID: r.TenantID,
		WorkspaceID: r.WorkspaceID, AllocationID: r.AllocationID, NodeID: r.NodeID,
		Details: map[string]any{"finding_id": r.ID, "kind": r.Kind, "severity": r.Severity, "cordoned": r.Cordoned},
	}
}
