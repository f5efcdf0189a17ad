package forward

import (
	"context"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/services/readmodel/gateway/caller"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// HostFacts serves HostFactsService.
type HostFacts struct{ *Command }

// NewHostFacts returns the server, which finds nodes as the commands do.
func NewHostFacts(command *Command) *HostFacts { return &HostFacts{command} }

// AcceptHostFacts takes what a node reports of its host for what it is to have.
func (h *HostFacts) AcceptHostFacts(ctx context.Context, req *readmodelv1.AcceptHostFactsRequest) (
	*readmodelv1.AcceptHostFactsResponse, error,
) {
	n, err := caller.Find(ctx, h.reads, (*view.Snapshot).Node, req.GetNode())
	if err != nil {
		return nil, err
	}
	answer, err := operator(ctx, "recovery", h.owners.HostFacts.AcceptHostFacts,
		&recoveryv1.AcceptHostFactsRequest{NodeId: n.GetNodeId(), Reason: req.GetReason(), Seen: req.GetSeen()})
	return &readmodelv1.AcceptHostFactsResponse{Accepted: answer.GetAccepted(), Pos: answer.GetPos()}, err
}
