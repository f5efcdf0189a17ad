package gateway

import (
	"context"

	"google.golang.org/protobuf/types/known/timestamppb"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/services/readmodel/gateway/caller"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// Audit serves AuditService.
type Audit struct{ deps Deps }

// NewAudit returns the server.
func NewAudit(deps Deps) *Audit { return &Audit{deps: deps} }

// ListAudit lists entries, newest first. A person of a tenant gets only the entries of that tenant.
func (a *Audit) ListAudit(ctx context.Context, req *readmodelv1.ListAuditRequest) (*readmodelv1.ListAuditResponse,
	error,
) {
	scope, err := caller.ScopeOf(ctx)
	if err != nil {
		return nil, err
	}
	if err := a.deps.Audit.WaitFor(ctx, req.GetMinPos()); err != nil {
		return nil, err
	}
	out := &readmodelv1.ListAuditResponse{}
	err = a.deps.Reads.Reader.Read(ctx, scope, func(ctx context.Context, s *view.Snapshot) error {
		f := view.AuditFilter{Action: req.GetAction()}
		if req.GetWorkspace() != "" {
			w, err := s.Workspace(ctx, req.GetWorkspace())
			if err != nil {
				return err
			}
			f.WorkspaceID = w.GetWorkspaceId()
		}
		if req.GetNode() != "" {
			n, err := s.Node(ctx, req.GetNode())
			if err != nil {
				return err
			}
			f.NodeID = n.GetNodeId()
		}
		var err error
		out.Items, out.NextPageToken, err = s.Audit(ctx, f, list.Page{Size: req.GetPageSize(), Token: req.GetPageToken()})
		return err
	})
	return out, err
}

// VerifyAudit checks the hash chain of the audit log.
func (a *Audit) VerifyAudit(ctx context.Context, _ *readmodelv1.VerifyAuditRequest) (*readmodelv1.VerifyAuditResponse,
	error,
) {
	if err := caller.OperatorsOnly(ctx); err != nil {
		return nil, err
	}
	v, err := a.deps.Audit.Verify(ctx)
	if err != nil {
		return nil, err
	}
	out := &readmodelv1.VerifyAuditResponse{
		Intact: v.Intact(), Rows: v.Rows - v.From, HeadHash: v.Head, BrokenAt: v.BrokenAt, BrokenBecause: v.Because,
		From: v.From, Signed: v.Signed, Unsigned: v.Unsigned, UnsignedBecause: v.UnsignedBecause,
	}
	if v.Signed > 0 {
		out.SignedAt = timestamppb.New(v.SignedAt)
	}
	return out, nil
}
