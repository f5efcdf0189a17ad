package task

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"connectrpc.com/connect"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1/lifecyclev1connect"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/rpc"
)

// streamedAtOnce bounds the requests of one stream that are worked on at once: past it the stream is not read.
const streamedAtOnce = 32

// StreamWork takes leases and reports of one replica of nodeapi over one stream, each as LeaseTasks and ReportTasks do.
func (s *Server) StreamWork(ctx context.Context, stream *connect.BidiStream[lifecyclev1.StreamWorkRequest, lifecyclev1.StreamWorkResponse]) error {
	var sending sync.Mutex
	send := func(res *lifecyclev1.StreamWorkResponse) error {
		sending.Lock()
		defer sending.Unlock()
		return stream.Send(res) //nolint:wrapcheck // a stream that ends is no fault
	}
	// The replica knows by it that it is heard.
	if err := send(&lifecyclev1.StreamWorkResponse{}); err != nil {
		return fmt.Errorf("open stream of work: %w", err)
	}
	var working sync.WaitGroup
	defer working.Wait() // what is under way is answered, if the stream still stands
	places := make(chan struct{}, streamedAtOnce)
	for {
		req, err := stream.Receive()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("receive work: %w", err)
		}
		select {
		case places <- struct{}{}:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		working.Go(func() {
			defer func() { <-places }()
			// A stream that cannot be written to ends for whoever reads it too.
			_ = send(s.streamed(ctx, req)) //nolint:errcheck // see above
		})
	}
}

// streamed does what one request of a stream asks for.
func (s *Server) streamed(ctx context.Context, req *lifecyclev1.StreamWorkRequest) *lifecyclev1.StreamWorkResponse {
	// As a call under way, it outlives the order to drain, which ends the stream: it is answered before the stream has ended.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Duration(req.GetTimeoutMs())*time.Millisecond)
	defer cancel()
	out := &lifecyclev1.StreamWorkResponse{Id: req.GetId()}
	var denial *commonv1.Denial
	switch r := req.GetRequest().(type) {
	case *lifecyclev1.StreamWorkRequest_Lease:
		denial = rpc.Frame(ctx, lifecyclev1connect.TaskServiceLeaseTasksProcedure, r.Lease, func(ctx context.Context) error {
			res, err := s.LeaseTasks(ctx, r.Lease)
			out.Response = &lifecyclev1.StreamWorkResponse_Lease{Lease: res}
			return err
		})
	case *lifecyclev1.StreamWorkRequest_Report:
		denial = rpc.Frame(ctx, lifecyclev1connect.TaskServiceReportTasksProcedure, r.Report, func(ctx context.Context) error {
			res, err := s.ReportTasks(ctx, r.Report)
			out.Response = &lifecyclev1.StreamWorkResponse_Report{Report: res}
			return err
		})
	default: // of a later build
		denial = fault.ToDenial(fault.New(commonv1.Reason_REASON_UNIMPLEMENTED, "this build does not know the request"), "")
	}
	if denial != nil {
		out.Response = &lifecyclev1.StreamWorkResponse_Denial{Denial: denial}
	}
	return out
}
