package forward

import (
	"context"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// Authority serves AuthorityService. Recovery decides and records; readmodel keeps no copy.
type Authority struct{ owners Owners }

// NewAuthority returns the server.
func NewAuthority(owners Owners) *Authority { return &Authority{owners: owners} }

// RotateAuthority begins the exchange of what the node authority signs with, or cancels the one that is announced.
func (a *Authority) RotateAuthority(ctx context.Context, req *readmodelv1.RotateAuthorityRequest) (
	*readmodelv1.RotateAuthorityResponse, error,
) {
	answer, err := operator(ctx, "recovery", a.owners.Authority.RotateAuthority, &recoveryv1.RotateAuthorityRequest{
		WithRoot: req.GetWithRoot(), Reason: req.GetReason(), IdempotencyKey: req.GetIdempotencyKey(),
		DryRun: req.GetDryRun(), Cancel: req.GetCancel(),
	})
	return &readmodelv1.RotateAuthorityResponse{Rotation: answer.GetRotation(), Pos: answer.GetPos()}, err
}

// RepairTrust has the ingress trust the root that the authority signs under now, or not any more.
func (a *Authority) RepairTrust(ctx context.Context, req *readmodelv1.RepairTrustRequest) (
	*readmodelv1.RepairTrustResponse, error,
) {
	answer, err := operator(ctx, "recovery", a.owners.Authority.RepairTrust, &recoveryv1.RepairTrustRequest{
		RootFingerprint: req.GetRootFingerprint(), Reason: req.GetReason(), Withdraw: req.GetWithdraw(),
	})
	return &readmodelv1.RepairTrustResponse{Issuers: answer.GetIssuers(), Pos: answer.GetPos()}, err
}
