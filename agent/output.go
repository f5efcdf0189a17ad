package agent

import (
	"context"
	"log/slog"
	"time"

	"github.com/gpuaas/mesh/agent/runtime/process"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

const (
	outputsWaiting = 4               // requests for output that may wait
	outputWithin   = 4 * time.Second // of one read; the control plane waits a little longer
)

// askOutput hands a request to the loop that reads output. The session's reader does not wait for it.
func (a *Agent) askOutput(ctx context.Context, req *nodev1.OutputRequest) {
	select {
	case a.outputs <- req:
	default:
		a.sendOutput(ctx, &nodev1.OutputChunk{
			RequestId: req.GetRequestId(),
			Denied: fault.ToDenial(fault.New(commonv1.Reason_REASON_AGENT_BUSY, "the agent has too many requests for output",
				fault.Remedy("ask again")), ""),
		})
	}
}

// readOutputs serves requests for output, one at a time, until ctx ends.
func (a *Agent) readOutputs(ctx context.Context) error {
	for {
		select {
		case req := <-a.outputs:
			a.sendOutput(ctx, a.readOutput(ctx, req))
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (a *Agent) readOutput(ctx context.Context, req *nodev1.OutputRequest) *nodev1.OutputChunk {
	ctx, cancel := context.WithTimeout(ctx, outputWithin)
	defer cancel()
	chunk := &nodev1.OutputChunk{RequestId: req.GetRequestId()}
	var err error
	if chunk.Output, err = a.work.Output(ctx, process.OutputRequest{
		WorkspaceID: req.GetWorkspaceId(), Epoch: req.GetEpoch(), Name: req.GetWorkload(), Previous: req.GetPrevious(),
		From: req.GetFrom(),
		Max:  int(req.GetMaxBytes()),
	}); err != nil {
		chunk.Denied = fault.ToDenial(err, "")
	}
	return chunk
}

func (a *Agent) sendOutput(ctx context.Context, chunk *nodev1.OutputChunk) {
	a.mu.Lock()
	client := a.client
	a.mu.Unlock()
	if client == nil {
		return
	}
	if err := client.Output(chunk); err != nil { // the control plane notices that the session ended, or that nothing came
		a.deps.Logger.LogAttrs(ctx, slog.LevelDebug, "output not sent", slog.Any("error", err))
	}
}
