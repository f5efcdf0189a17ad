package finding

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/audit"
)

// decided records the audit entry of a finding that was opened or resolved. A finding that is seen again has none.
func decided(ctx context.Context, tx pgx.Tx, action string, r Row) error {
	_, err := audit.Record(ctx, tx, audit.Entry{
		Action: action, Reason: r.Summary, SubjectType: r.SubjectType, SubjectID: r.SubjectID, TenantID: r.TenantID,
		WorkspaceID: r.WorkspaceID, AllocationID: r.AllocationID, NodeID: r.NodeID,
		Details: map[string]any{"finding_id": r.ID, "kind": r.Kind, "severity": r.Severity, "cordoned": r.Cordoned},
	})
	return err
}
