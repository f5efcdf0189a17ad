package forward

import (
	"context"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/services/readmodel/gateway/caller"
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
	if err := caller.OperatorsOnly(ctx); err != nil {
		return nil, err
	}
	answer, err := i.owners.Instances.EndInstance(ctx, req.GetRequest())
	return &readmodelv1.EndInstanceResponse{Response: answer}, Refused("lifecycle", err)
}
