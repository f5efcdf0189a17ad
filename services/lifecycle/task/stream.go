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

// StreamWork takes leases and reports of one replica of nodeapi over one stream, each as LeaseTasks and ReportTasks do,
// and tells it of what was leased to its sessions as it was queued.
func (s *Server) StreamWork(ctx context.Context, stream *connect.BidiStream[lifecyclev1.StreamWorkRequest, lifecyclev1.StreamWorkResponse]) error {
	var sending sync.Mutex
	send := func(res *lifecyclev1.StreamWorkResponse) error {
		sending.Lock()
		defer sending.Unlock()
		return stream.Send(res)
	}
	// The replica knows by it that it is heard.
	if err := send(&lifecyclev1.StreamWorkResponse{}); err != nil {
		return fmt.Errorf("open stream of work: %w", err)
	}
	var working sync.WaitGroup
	defer working.Wait() // what is under way is answered, if the stream still stands
	out := newOutlet()
	defer s.standing.remove(out)
	offering, stop := context.WithCancel(ctx)
	defer stop()
	working.Go(func() { s.offerStanding(offering, out, send) })
	// Those that have worked on a request stay for the next one: what a request needs of a stack, a new goroutine would
	// grow each time.
	requests := make(chan *lifecyclev1.StreamWorkRequest)
	defer close(requests)
	workers := 0
	for {
		req, err := stream.Receive()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("receive work: %w", err)
		}
		select {
		case requests <- req:
			continue
		default:
		}
		if workers < streamedAtOnce {
			workers++
			working.Go(func() {
				for ; req != nil; req = <-requests {
					// A stream that cannot be written to ends for whoever reads it too.
					_ = send(s.streamed(ctx, out, req)) //nolint:errcheck // see above
				}
			})
			continue
		}
		select {
		case requests <- req:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// streamed does what one request of a stream asks for. out is the way to its replica.
func (s *Server) streamed(ctx context.Context, out *outlet, req *lifecyclev1.StreamWorkRequest) *lifecyclev1.StreamWorkResponse {
	// As a call under way, it outlives the order to drain, which ends the stream: it is answered before the stream has ended.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Duration(req.GetTimeoutMs())*time.Millisecond)
	defer cancel()
	answer := &lifecyclev1.StreamWorkResponse{Id: req.GetId()}
	var denial *commonv1.Denial
	switch r := req.GetRequest().(type) {
	case *lifecyclev1.StreamWorkRequest_Lease:
		denial = rpc.Frame(ctx, lifecyclev1connect.TaskServiceLeaseTasksProcedure, r.Lease, func(ctx context.Context) error {
			res, err := s.LeaseTasks(ctx, r.Lease)
			answer.Response = &lifecyclev1.StreamWorkResponse_Lease{Lease: res}
			if err == nil && r.Lease.GetStanding() {
				s.standing.put(out, r.Lease, res.GetRefused())
			}
			return err
		})
	case *lifecyclev1.StreamWorkRequest_Report:
		denial = rpc.Frame(ctx, lifecyclev1connect.TaskServiceReportTasksProcedure, r.Report, func(ctx context.Context) error {
			res, err := s.ReportTasks(ctx, r.Report)
			answer.Response = &lifecyclev1.StreamWorkResponse_Report{Report: res}
			return err
		})
	case *lifecyclev1.StreamWorkRequest_End:
		denial = rpc.Frame(ctx, lifecyclev1connect.TaskServiceStreamWorkProcedure, r.End, func(context.Context) error {
			s.standing.end(out, r.End.GetSessions())
			answer.Response = &lifecyclev1.StreamWorkResponse_End{End: &lifecyclev1.EndLeasesResponse{}}
			return nil
		})
	default: // of a later build
		denial = fault.ToDenial(fault.New(commonv1.Reason_REASON_UNIMPLEMENTED, "this build does not know the request"), "")
	}
	if denial != nil {
		answer.Response = &lifecyclev1.StreamWorkResponse_Denial{Denial: denial}
	}
	return answer
}
