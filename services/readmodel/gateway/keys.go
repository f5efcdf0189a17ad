package gateway

import (
	"context"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// Keys serves KeyService: recovery has the set, and no copy of it is shown.
type Keys struct{ deps Deps }

// NewKeys makes the server.
func NewKeys(deps Deps) *Keys { return &Keys{deps: deps} }

// ListKeys shows the keys with their states and holders.
func (k *Keys) ListKeys(ctx context.Context, _ *readmodelv1.ListKeysRequest) (*readmodelv1.ListKeysResponse, error) {
	if err := operatorsOnly(ctx); err != nil {
		return nil, err
	}
	answer, err := k.deps.Owners.Keys.ListKeys(ctx, &recoveryv1.ListKeysRequest{})
	if err != nil {
		return nil, ownerError("recovery", err)
	}
	return &readmodelv1.ListKeysResponse{Keys: answer.GetKeys(), Problems: answer.GetProblems()}, nil
}

// RotateKey asks for the next key of a kind.
func (k *Keys) RotateKey(ctx context.Context, req *readmodelv1.RotateKeyRequest) (*readmodelv1.RotateKeyResponse, error) {
	if err := operatorsOnly(ctx); err != nil {
		return nil, err
	}
	answer, err := k.deps.Owners.Keys.RotateKey(ctx, &recoveryv1.RotateKeyRequest{
		Kind: req.GetKind(), Reason: req.GetReason(), IdempotencyKey: req.GetIdempotencyKey(), DryRun: req.GetDryRun(),
	})
	if err != nil {
		return nil, ownerError("recovery", err)
	}
	return &readmodelv1.RotateKeyResponse{Rotation: answer}, nil
}
