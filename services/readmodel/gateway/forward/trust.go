package forward

import (
	"context"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// Trust serves TrustService. Every answer comes from recovery, which makes the checks; readmodel keeps no copy.
type Trust struct{ owners Owners }

// NewTrust returns the server.
func NewTrust(owners Owners) *Trust { return &Trust{owners: owners} }

// GetTrust returns what the authority signs with, what the ingress trusts, and the state of the preflight.
func (t *Trust) GetTrust(ctx context.Context, _ *readmodelv1.GetTrustRequest) (*readmodelv1.GetTrustResponse, error) {
	answer, err := operator(ctx, "recovery", t.owners.Trust.GetTrust, &recoveryv1.GetTrustRequest{})
	return &readmodelv1.GetTrustResponse{Trust: answer}, err
}

// RunPreflight makes one check now.
func (t *Trust) RunPreflight(ctx context.Context, _ *readmodelv1.RunPreflightRequest) (
	*readmodelv1.RunPreflightResponse, error,
) {
	answer, err := operator(ctx, "recovery", t.owners.Trust.RunPreflight, &recoveryv1.RunPreflightRequest{})
	return &readmodelv1.RunPreflightResponse{Check: answer}, err
}
