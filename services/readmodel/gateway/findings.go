package gateway

import (
	"context"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// Findings serves FindingService.
type Findings struct{ query *Query }

// NewFindings makes the server.
func NewFindings(query *Query) *Findings { return &Findings{query: query} }

// ListFindings lists findings, the open ones unless asked for all.
func (f *Findings) ListFindings(ctx context.Context, req *readmodelv1.ListFindingsRequest) (*readmodelv1.ListFindingsResponse, error) {
	items, next, err := list(ctx, f.query, req, func(ctx context.Context, s *view.Snapshot, page view.Page) ([]*lifecyclev1.Finding, string, error) {
		filter := view.FindingFilter{Resolved: req.GetIncludeResolved()}
		if req.GetWorkspace() != "" {
			w, err := s.Workspace(ctx, req.GetWorkspace())
			if err != nil {
				return nil, "", err //nolint:wrapcheck // it is the answer
			}
			filter.WorkspaceID = w.GetWorkspaceId()
		}
		return s.Findings(ctx, filter, page)
	})
	if err != nil {
		return nil, err
	}
	return &readmodelv1.ListFindingsResponse{Items: items, NextPageToken: next}, nil
}
