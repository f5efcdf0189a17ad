package gateway

import (
	"context"
	"time"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/services/readmodel/gateway/caller"
)

// healthWithin bounds the wait for recovery, which adds to what a node shows and is no condition of it.
const healthWithin = time.Second

// health returns what recovery knows of a node beside its verdict; nil for people of a tenant, and if recovery does not
// answer.
func (q *Query) health(ctx context.Context, nodeID string) *recoveryv1.NodeHealth {
	if caller.OperatorsOnly(ctx) != nil || q.deps.Owners.Health == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, healthWithin)
	defer cancel()
	answer, err := q.deps.Owners.Health.GetNodeHealth(ctx, &recoveryv1.GetNodeHealthRequest{NodeId: nodeID})
	if err != nil {
		return nil
	}
	return answer.GetHealth()
}
