package gateway

import (
	"context"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// Instances serves InstanceService: it forwards to lifecycle what ends an instance that no workspace accounts for.
type Instances struct{ deps Deps }

// NewInstances makes the server.
func NewInstances(deps Deps) *Instances { return &Instances{deps: deps} }

// EndInstance ends an instance that a placement lists and whose workspace is not known.
func (i *Instances) EndInstance(ctx context.Context, req *readmodelv1.EndInstanceRequest) (*readmodelv1.EndInstanceResponse, error) {
	if err := operatorsOnly(ctx); err != nil {
		return nil, err
	}
	answer, err := i.deps.Owners.Instances.EndInstance(ctx, req.GetRequest())
	if err != nil {
		return nil, ownerError("lifecycle", err)
	}
	return &readmodelv1.EndInstanceResponse{Response: answer}, nil
}
