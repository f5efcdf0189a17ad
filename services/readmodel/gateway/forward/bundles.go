package forward

import (
	"context"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// Bundles serves BundleService. Recovery issues the token and makes the archive; readmodel keeps no copy.
type Bundles struct{ owners Owners }

// NewBundles returns the server.
func NewBundles(owners Owners) *Bundles { return &Bundles{owners: owners} }

// IssueBundle issues a bundle for a node that exists.
func (b *Bundles) IssueBundle(ctx context.Context, req *readmodelv1.IssueBundleRequest) (
	*readmodelv1.IssueBundleResponse, error,
) {
	answer, err := operator(ctx, "recovery", b.owners.Bundles.IssueBundle, &recoveryv1.IssueBundleRequest{
		NodeId: req.GetNodeId(), Reason: req.GetReason(), ValidFor: req.GetValidFor(),
		IdempotencyKey: req.GetIdempotencyKey(),
	})
	return &readmodelv1.IssueBundleResponse{
		Archive: answer.GetArchive(), Digest: answer.GetDigest(), TokenId: answer.GetTokenId(),
		ExpiresAt: answer.GetExpiresAt(), NodeId: answer.GetNodeId(), NodeName: answer.GetNodeName(),
		Profile: answer.GetProfile(), Pos: answer.GetPos(),
	}, err
}
