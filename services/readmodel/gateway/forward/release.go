package forward

import (
	"context"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/services/readmodel/gateway/caller"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// Releases serves ReleaseService: it returns allocations, and forwards the requests that release them to lifecycle.
type Releases struct {
	reads  caller.Reads
	owners Owners
}

// NewReleases returns the server.
func NewReleases(reads caller.Reads, owners Owners) *Releases {
	return &Releases{reads: reads, owners: owners}
}

// GetAllocation returns one allocation with the claims of its workspace that are not released.
func (r *Releases) GetAllocation(ctx context.Context,
	req *readmodelv1.GetAllocationRequest,
) (*readmodelv1.GetAllocationResponse, error) {
	res := &readmodelv1.GetAllocationResponse{}
	err := r.reads.Read(ctx, req.GetMinPos(), func(ctx context.Context, s *view.Snapshot) error {
		var err error
		if res.Allocation, err = s.Allocation(ctx, req.GetAllocationId()); err != nil {
			return err
		}
		res.Claims, _, err = s.Claims(ctx, view.PerWorkspaceFilter{WorkspaceID: res.GetAllocation().GetWorkspaceId()},
			list.Page{Size: mostClaims})
		return err
	})
	return res, err
}

// mostClaims is how many claims are returned with an allocation at most: a workspace has a few.
const mostClaims = 200

// RetryRelease retries the cleanup that a failed release has left.
func (r *Releases) RetryRelease(ctx context.Context,
	req *readmodelv1.RetryReleaseRequest,
) (*readmodelv1.RetryReleaseResponse, error) {
	answer, err := operator(ctx, "lifecycle", r.owners.Allocations.RetryRelease, req.GetRequest())
	return &readmodelv1.RetryReleaseResponse{Response: answer}, err
}

// ForceRelease releases an allocation on a person's attestation.
func (r *Releases) ForceRelease(ctx context.Context,
	req *readmodelv1.ForceReleaseRequest,
) (*readmodelv1.ForceReleaseResponse, error) {
	answer, err := operator(ctx, "lifecycle", r.owners.Allocations.ForceRelease, req.GetRequest())
	return &readmodelv1.ForceReleaseResponse{Response: answer}, err
}
