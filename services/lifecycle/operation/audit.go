package operation

import (
	"context"
	"log/slog"

	"github.com/jackc/pgx/v5"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/rpc"
)

// requested returns the audit entry of a request, as far as the request itself determines it.
func requested(req *lifecyclev1.RequestOperationRequest) audit.Entry {
	e := audit.Entry{
		Action: "workspace." + names.Of(req.GetKind()), Reason: req.GetReason(), SubjectType: "workspace",
		SubjectID: req.GetWorkspaceId(), WorkspaceID: req.GetWorkspaceId(), Details: map[string]any{},
	}
	if req.GetRequester() != "" {
		e.Details["requester"] = req.GetRequester()
	}
	if req.GetOverride() {
		e.Details["override"] = true
	}
	if req.GetFencedProof() != noProof {
		e.Details["fenced_proof"] = names.Of(req.GetFencedProof())
	}
	if c := req.GetCreate(); c != nil {
		e.SubjectID = c.GetTenant() + "/" + c.GetName()
	}
	return e
}

// decided records, in the transaction of the operation, an operation that was begun or done. A join begins nothing and
// is not recorded.
func (s *Server) decided(ctx context.Context, tx pgx.Tx, tenantID string, req *lifecyclev1.RequestOperationRequest,
	op *lifecyclev1.Operation,
) error {
	if op.GetJoined() || op.GetReplayed() || op.GetDryRun() {
		return nil
	}
	e := requested(req)
	e.SubjectID, e.WorkspaceID, e.WorkflowID, e.TenantID = op.GetWorkspaceId(), op.GetWorkspaceId(), op.GetOperationId(),
		tenantID
	e.Details["epoch"] = op.GetEpoch()
	if c := req.GetCreate(); c != nil {
		e.Details["name"] = c.GetTenant() + "/" + c.GetName()
	}
	_, err := s.deps.Audit.Record(ctx, tx, e)
	return err
}

// joined counts a request that was joined to an operation that is under way.
func (s *Server) joined(ctx context.Context, req *lifecyclev1.RequestOperationRequest, op *lifecyclev1.Operation) {
	if !op.GetJoined() || op.GetDryRun() {
		return
	}
	e := requested(req)
	e.Action += ".join"
	e.Reason, e.WorkspaceID, e.WorkflowID = "", op.GetWorkspaceId(), op.GetOperationId()
	if err := s.deps.Audit.Repeated(ctx, e); err != nil && ctx.Err() == nil {
		s.deps.Logger.WarnContext(ctx, "join not audited", slog.String(obs.KeyWorkspaceID, e.WorkspaceID), obs.Err(err))
	}
}

// refused counts a request that was refused, and returns its refusal. The refusal of a dry run is not counted.
func (s *Server) refused(ctx context.Context, req *lifecyclev1.RequestOperationRequest, err error) error {
	if req.GetDryRun() {
		return err
	}
	e := requested(req)
	if person, ok := rpc.PersonFrom(ctx); ok {
		e.TenantID = person.TenantID // empty for a person of the operator, whichever tenant the workspace is of
	}
	return s.deps.Audit.Refuse(ctx, e, err)
}
