package forward

import (
	"context"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// Keys serves KeyService. Every answer comes from recovery, which owns the key set; readmodel keeps no copy.
type Keys struct{ owners Owners }

// NewKeys returns the server.
func NewKeys(owners Owners) *Keys { return &Keys{owners: owners} }

// ListKeys lists the keys with their states and the replicas that have them.
func (k *Keys) ListKeys(ctx context.Context, _ *readmodelv1.ListKeysRequest) (*readmodelv1.ListKeysResponse, error) {
	answer, err := operator(ctx, "recovery", k.owners.Keys.ListKeys, &recoveryv1.ListKeysRequest{})
	return &readmodelv1.ListKeysResponse{Keys: answer.GetKeys(), Problems: answer.GetProblems()}, err
}

// RotateKey asks for the next key of a kind.
func (k *Keys) RotateKey(ctx context.Context, req *readmodelv1.RotateKeyRequest) (*readmodelv1.RotateKeyResponse,
	error,
) {
	answer, err := operator(ctx, "recovery", k.owners.Keys.RotateKey, &recoveryv1.RotateKeyRequest{
		Kind: req.GetKind(), Reason: req.GetReason(), IdempotencyKey: req.GetIdempotencyKey(), DryRun: req.GetDryRun(),
	})
	return &readmodelv1.RotateKeyResponse{Rotation: answer}, err
}
