package forward

import (
	"context"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// Instances serves InstanceService: it forwards to lifecycle the request to end an instance that belongs to no known
// workspace.
type Instances struct{ owners Owners }

// NewInstances returns the server.
func NewInstances(owners Owners) *Instances { return &Instances{owners: owners} }

// EndInstance ends an instance that a placement lists and whose workspace lifecycle does not know.
func (i *Instances) EndInstance(ctx context.Context,
	req *readmodelv1.EndInstanceRequest,
) (*readmodelv1.EndInstanceResponse, error) {
	answer, err := operator(ctx, "lifecycle", i.owners.Instances.EndInstance, req.GetRequest())
	return &readmodelv1.EndInstanceResponse{Response: answer}, err
}
