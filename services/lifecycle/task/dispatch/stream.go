package dispatch

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
	"github.com/gpuaas/mesh/internal/rpc/guard"
)

// streamedAtOnce bounds the requests of one stream that are served at once: beyond it the stream is not read.
const streamedAtOnce = 32

// StreamWork serves the leases and reports of one replica of nodeapi over one stream, as LeaseTasks and ReportTasks do,
// and sends the replica the tasks that were leased to its sessions as they were queued.
func (s *Server) StreamWork(ctx context.Context,
	stream *connect.BidiStream[lifecyclev1.StreamWorkRequest, lifecyclev1.StreamWorkResponse],
) error {
	var sending sync.Mutex
	send := func(res *lifecyclev1.StreamWorkResponse) error {
		sending.Lock()
		defer sending.Unlock()
		return stream.Send(res)
	}
	// By this message the replica knows that the stream is served.
	if err := send(&lifecyclev1.StreamWorkResponse{}); err != nil {
		return fmt.Errorf("open stream of work: %w", err)
	}
	var working sync.WaitGroup
	defer working.Wait() // requests under way are answered, if the stream is still open
	out := newOutlet()
	defer s.standing.remove(out)
	offering, stop := context.WithCancel(ctx)
	defer stop()
	working.Go(func() { s.offerStanding(offering, out, send) })
	// A worker goroutine stays for the next request: a new goroutine would have to grow its stack for each request.
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
					// If the stream cannot be written to, Receive fails as well and ends it.
					_ = send(s.streamed(ctx, out, req))
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

// streamed serves one request of a stream and returns its response. out is the outlet to the stream's replica.
func (s *Server) streamed(ctx context.Context, out *outlet,
	req *lifecyclev1.StreamWorkRequest,
) *lifecyclev1.StreamWorkResponse {
	// Like a call under way, the request outlives the drain signal, which ends the stream: it is answered before the
	// stream has ended.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Duration(req.GetTimeoutMs())*time.Millisecond)
	defer cancel()
	answer := &lifecyclev1.StreamWorkResponse{Id: req.GetId()}
	var denial *commonv1.Denial
	switch r := req.GetRequest().(type) {
	case *lifecyclev1.StreamWorkRequest_Lease:
		denial = guard.Frame(ctx, lifecyclev1connect.TaskServiceLeaseTasksProcedure, r.Lease,
			func(ctx context.Context) error {
				res, err := s.LeaseTasks(ctx, r.Lease)
				answer.Response = &lifecyclev1.StreamWorkResponse_Lease{Lease: res}
				if err == nil && r.Lease.GetStanding() {
					s.standing.put(out, r.Lease, res.GetRefused())
				}
				return err
			})
	case *lifecyclev1.StreamWorkRequest_Report:
		denial = guard.Frame(ctx, lifecyclev1connect.TaskServiceReportTasksProcedure, r.Report,
			func(ctx context.Context) error {
				res, err := s.ReportTasks(ctx, r.Report)
				answer.Response = &lifecyclev1.StreamWorkResponse_Report{Report: res}
				return err
			})
	case *lifecyclev1.StreamWorkRequest_End:
		denial = guard.Frame(ctx, lifecyclev1connect.TaskServiceStreamWorkProcedure, r.End, func(context.Context) error {
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
