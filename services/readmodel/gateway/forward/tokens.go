package forward

import (
	"context"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// Tokens serves TokenService. Every answer comes from recovery, which owns the tokens; readmodel keeps no copy.
type Tokens struct{ owners Owners }

// NewTokens returns the server.
func NewTokens(owners Owners) *Tokens { return &Tokens{owners: owners} }

// ListTokens lists recovery tokens, without their text.
func (t *Tokens) ListTokens(ctx context.Context, req *readmodelv1.ListTokensRequest) (
	*readmodelv1.ListTokensResponse, error,
) {
	answer, err := operator(ctx, "recovery", t.owners.Tokens.ListTokens, &recoveryv1.ListTokensRequest{
		NodeId: req.GetNodeId(), PageSize: req.GetPageSize(), PageToken: req.GetPageToken(),
	})
	return &readmodelv1.ListTokensResponse{
		Items: answer.GetItems(), NextPageToken: answer.GetNextPageToken(), Extensions: answer.GetExtensions(),
	}, err
}

// RevokeTokens ends one token, or all of a node.
func (t *Tokens) RevokeTokens(ctx context.Context, req *readmodelv1.RevokeTokensRequest) (
	*readmodelv1.RevokeTokensResponse, error,
) {
	answer, err := operator(ctx, "recovery", t.owners.Tokens.RevokeTokens, &recoveryv1.RevokeTokensRequest{
		TokenId: req.GetTokenId(), NodeId: req.GetNodeId(), Reason: req.GetReason(),
	})
	return &readmodelv1.RevokeTokensResponse{Tokens: answer.GetTokens(), Pos: answer.GetPos()}, err
}

// ExtendTokens extends the tokens of a profile.
func (t *Tokens) ExtendTokens(ctx context.Context, req *readmodelv1.ExtendTokensRequest) (
	*readmodelv1.ExtendTokensResponse, error,
) {
	answer, err := operator(ctx, "recovery", t.owners.Tokens.ExtendTokens, &recoveryv1.ExtendTokensRequest{
		Profile: req.GetProfile(), Until: req.GetUntil(), Reason: req.GetReason(),
	})
	return &readmodelv1.ExtendTokensResponse{Extension: answer.GetExtension(), Pos: answer.GetPos()}, err
}
