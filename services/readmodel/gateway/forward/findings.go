package forward

import (
	"context"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/services/readmodel/gateway/caller"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// Findings serves FindingService: it returns findings, and forwards a person's acknowledgement of one to lifecycle.
type Findings struct {
	reads  caller.Reads
	owners Owners
}

// NewFindings returns the server.
func NewFindings(reads caller.Reads, owners Owners) *Findings {
	return &Findings{reads: reads, owners: owners}
}

// ListFindings lists the open findings, or all of them if the request includes resolved ones.
func (f *Findings) ListFindings(ctx context.Context,
	req *readmodelv1.ListFindingsRequest,
) (*readmodelv1.ListFindingsResponse, error) {
	items, next, err := caller.List(ctx, f.reads, req,
		func(ctx context.Context, s *view.Snapshot, page list.Page) ([]*lifecyclev1.Finding, string, error) {
			filter := view.FindingFilter{Resolved: req.GetIncludeResolved()}
			if req.GetWorkspace() != "" {
				w, err := s.Workspace(ctx, req.GetWorkspace())
				if err != nil {
					return nil, "", err
				}
				filter.WorkspaceID = w.GetWorkspaceId()
			}
			return s.Findings(ctx, filter, page)
		})
	return &readmodelv1.ListFindingsResponse{Items: items, NextPageToken: next}, err
}

// GetFinding returns one finding, open or resolved.
func (f *Findings) GetFinding(ctx context.Context, req *readmodelv1.GetFindingRequest) (*readmodelv1.GetFindingResponse,
	error,
) {
	finding, err := caller.Get(ctx, f.reads, req.GetMinPos(), (*view.Snapshot).Finding, req.GetFindingId())
	return &readmodelv1.GetFindingResponse{Finding: finding}, err
}

// AcknowledgeFinding resolves the finding about a row that was changed by hand.
func (f *Findings) AcknowledgeFinding(ctx context.Context,
	req *readmodelv1.AcknowledgeFindingRequest,
) (*readmodelv1.AcknowledgeFindingResponse, error) {
	answer, err := operator(ctx, "lifecycle", f.owners.Findings.AcknowledgeFinding, req.GetRequest())
	return &readmodelv1.AcknowledgeFindingResponse{Response: answer}, err
}
