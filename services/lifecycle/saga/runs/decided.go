package runs

import (
	"context"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/names"
)

// Decided adds the audit entry of a run that ended or got stuck. It adds none for a run in another state.
func (b *Buffer) Decided(ctx context.Context, run *Run) {
	e := audit.Entry{
		Action: actionOf(run.Kind), SubjectType: "workspace", SubjectID: run.WorkspaceID, TenantID: run.TenantID,
		WorkspaceID: run.WorkspaceID, WorkflowID: run.ID, CorrelationID: run.CorrelationID,
		Details: map[string]any{"epoch": run.Epoch, "round": run.Round, "requester": run.Requester},
	}
	switch run.State {
	case Succeeded:
		e.Action += ".completed"
	case Failed:
		e.Action, e.Outcome, e.Reason = e.Action+".failed", audit.Failed, run.Error
		if run.CancelAt != nil {
			e.Details["cancelled_by"], e.Details["cancel_reason"] = run.CancelBy, run.CancelReason
		}
	case Stuck:
		e.Action, e.Outcome, e.Reason = e.Action+".stuck", audit.Failed, run.StuckReason
	default:
		return
	}
	if e.Outcome == audit.Failed {
		e.Details["error_code"], e.Details["error_layer"] = run.ErrorCode, run.ErrorLayer
		if run.ErrorStep >= 0 && run.ErrorStep < len(run.StepNames) {
			e.Details["step"] = run.StepNames[run.ErrorStep]
		}
	}
	b.list = append(b.list, audit.Event(ctx, e))
}

// actionOf returns the audit action of a kind of run. CREATE and RETRY are both `tenant.provisioning`, the name by
// which people search for what first brings a tenant's workspace up.
func actionOf(kind string) string {
	switch kind {
	case names.Of(commonv1.OperationKind_OPERATION_KIND_CREATE), names.Of(commonv1.OperationKind_OPERATION_KIND_RETRY):
		return "tenant.provisioning"
	default:
		return "workspace." + strings.ToLower(kind)
	}
}
