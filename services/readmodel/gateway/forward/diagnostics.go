package forward

import (
	"context"
	"fmt"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/services/readmodel/gateway/caller"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// Diagnostics serves DiagnosticsService. Recovery decides what a record explains, and lifecycle has the tasks that
// collect one; readmodel keeps no copy.
type Diagnostics struct {
	reads  caller.Reads
	owners Owners
}

// NewDiagnostics returns the server.
func NewDiagnostics(reads caller.Reads, owners Owners) *Diagnostics {
	return &Diagnostics{reads, owners}
}

// MergeDiagnostics brings the record of a node's host.
func (d *Diagnostics) MergeDiagnostics(ctx context.Context, req *readmodelv1.MergeDiagnosticsRequest,
) (*readmodelv1.MergeDiagnosticsResponse, error) {
	n, err := d.node(ctx, req.GetNode())
	if err != nil {
		return nil, err
	}
	answer, err := operator(ctx, "recovery", d.owners.Diagnostics.MergeDiagnostics,
		&recoveryv1.MergeDiagnosticsRequest{NodeId: n.GetNodeId(), Records: req.GetRecords()})
	return &readmodelv1.MergeDiagnosticsResponse{NodeId: n.GetNodeId(), Merged: answer}, err
}

// CollectDiagnostics asks the agent of a node for its record. An agent that is not connected cannot be asked.
func (d *Diagnostics) CollectDiagnostics(ctx context.Context, req *readmodelv1.CollectDiagnosticsRequest,
) (*readmodelv1.CollectDiagnosticsResponse, error) {
	n, err := d.node(ctx, req.GetNode())
	if err != nil {
		return nil, err
	}
	if !n.GetConnected() {
		return nil, fault.New(commonv1.Reason_REASON_NODE_NOT_CONNECTED,
			fmt.Sprintf("the agent of %s has no session: it cannot be asked for its record", n.GetName()),
			fault.Remedy("on the host: gpuaas-node-agent diag -o json > diag.json; then: gpuaas nodes diag "+n.GetName()+
				" --file diag.json"))
	}
	answer, err := operator(ctx, "lifecycle", d.owners.Collected.CollectDiagnostics,
		&lifecyclev1.CollectDiagnosticsRequest{NodeId: n.GetNodeId(), IdempotencyKey: req.GetIdempotencyKey()})
	return &readmodelv1.CollectDiagnosticsResponse{Task: answer.GetTask(), Pos: answer.GetPos()}, err
}

// GetCollectedDiagnostics returns what a task of CollectDiagnostics brought.
func (d *Diagnostics) GetCollectedDiagnostics(ctx context.Context, req *readmodelv1.GetCollectedDiagnosticsRequest,
) (*readmodelv1.GetCollectedDiagnosticsResponse, error) {
	answer, err := operator(ctx, "lifecycle", d.owners.Collected.GetCollectedDiagnostics,
		&lifecyclev1.GetCollectedDiagnosticsRequest{TaskId: req.GetTaskId()})
	return &readmodelv1.GetCollectedDiagnosticsResponse{Diagnostics: answer.GetDiagnostics()}, err
}

func (d *Diagnostics) node(ctx context.Context, ref string) (*readmodelv1.Node, error) {
	if err := caller.OperatorsOnly(ctx); err != nil {
		return nil, err
	}
	return caller.Find(ctx, d.reads, (*view.Snapshot).Node, ref)
}
