package work

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"connectrpc.com/connect"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/services/nodeapi/batch"
	"github.com/gpuaas/mesh/services/nodeapi/roster"
)

// send delivers reports, and then releases their sessions. A batch that timed out is sent as two of half the size,
// since the same batch would be no faster. A node whose report times out alone is given up, so that it delays no other;
// its agent sends its results again after a while.
func (r *Reporter) send(ctx context.Context, sessions []*roster.Session, reports []*lifecyclev1.NodeReport) {
	half := len(reports) / 2
	if r.deliver(ctx, sessions, reports) || half == 0 {
		r.release(sessions)
		return
	}
	r.send(ctx, sessions[:half], reports[:half])
	r.send(ctx, sessions[half:], reports[half:])
}

// deliver sends reports until lifecycle has taken them or all their sessions have ended. It returns false if a batch
// timed out that may be sent in smaller parts.
func (r *Reporter) deliver(ctx context.Context, sessions []*roster.Session, reports []*lifecyclev1.NodeReport) bool {
	pause := 50 * time.Millisecond
	for {
		res, err := r.call(ctx, reports)
		switch {
		case err == nil:
			r.acknowledge(ctx, sessions, res)
			return true
		case ctx.Err() != nil:
			return true
		case batch.Refused(err):
			r.isolate(ctx, sessions, reports, err)
			return true
		}
		r.logger.WarnContext(ctx, "report not taken", slog.Int("nodes", len(reports)), slog.Any("error", err))
		switch {
		case allGone(sessions): // the agents send their results again over their next sessions
			return true
		case timedOut(err):
			return false
		}
		select {
		case <-time.After(pause):
			pause = min(2*pause, time.Second)
		case <-ctx.Done():
			return true
		}
	}
}

func timedOut(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || connect.CodeOf(err) == connect.CodeDeadlineExceeded ||
		fault.Has(err, commonv1.Reason_REASON_DEADLINE_EXCEEDED)
}

func (r *Reporter) call(ctx context.Context, reports []*lifecyclev1.NodeReport) (*lifecyclev1.ReportTasksResponse,
	error,
) {
	call, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return r.lifecycle.ReportTasks(call, &lifecyclev1.ReportTasksRequest{ReplicaId: r.replicaID, Reports: reports})
}

// isolate sends each report of a refused batch alone, so that one node's report does not block the others, and ends a
// session whose report is refused.
func (r *Reporter) isolate(ctx context.Context, sessions []*roster.Session, reports []*lifecyclev1.NodeReport,
	refusal error,
) {
	for i, one := range reports {
		res, err := (*lifecyclev1.ReportTasksResponse)(nil), refusal
		if len(reports) > 1 {
			res, err = r.call(ctx, reports[i:i+1])
		}
		switch {
		case err == nil:
			r.acknowledge(ctx, sessions[i:i+1], res)
		case batch.Refused(err):
			r.logger.WarnContext(ctx, "report refused for good", slog.String("node_id", one.GetNodeId()), slog.Any("error", err))
			sessions[i].Close(fault.ToDenial(fault.New(commonv1.Reason_REASON_PROTOCOL_VIOLATION,
				"what this session reported is not valid"), ""))
		default:
			// The agent sends its results again after a while.
			r.logger.WarnContext(ctx, "report not taken", slog.String("node_id", one.GetNodeId()), slog.Any("error", err))
		}
	}
}

// acknowledge sends the agents acknowledgements of committed results. It waits for a fresh view first, so that a
// session which was fenced meanwhile is closed before it gets one.
func (r *Reporter) acknowledge(ctx context.Context, sessions []*roster.Session, res *lifecyclev1.ReportTasksResponse) {
	if failpoint.Hit("nodeapi.report.before_ack") != nil || len(res.GetResults()) == 0 {
		return
	}
	if r.view.WaitFresh(ctx) != nil {
		return
	}
	for i, n := range res.GetResults() {
		if i >= len(sessions) {
			continue
		}
		r.refused(ctx, sessions[i], n.GetRefused())
		if len(n.GetAcknowledged()) == 0 {
			continue
		}
		sessions[i].Send(
			&nodev1.ConnectResponse{
				Frame: &nodev1.ConnectResponse_TaskResultAck{TaskResultAck: &nodev1.TaskResultAck{Tasks: n.GetAcknowledged()}},
			},
		)
		r.metrics.Acknowledged(len(n.GetAcknowledged()))
	}
}

// refused sends an agent the refusals of its reports, and ends its session after maxRefusals reports of attempts
// without proof. After a restore an agent sends the proof of attempts from before the session unasked, so this many
// refusals do not happen with a working agent.
func (r *Reporter) refused(ctx context.Context, s *roster.Session, refusals []*lifecyclev1.TaskRefusal) {
	if len(refusals) == 0 {
		return
	}
	total := s.ReportsRefused(len(refusals))
	for _, one := range refusals[:min(len(refusals), maxRefusals)] {
		refused := &nodev1.TaskReportRefused{
			Tasks: []*nodev1.TaskRef{one.GetTask()}, Denial: one.GetDenial(), EnvelopeWanted: one.GetEnvelopeWanted(),
		}
		s.Send(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_TaskReportRefused{TaskReportRefused: refused}})
	}
	if total < maxRefusals {
		return
	}
	r.logger.WarnContext(ctx, "session reports attempts that nothing proves", slog.String("node_id", s.Identity.NodeID),
		slog.String("session_id", s.ID),
		slog.Int("refused", total))
	s.Close(fault.ToDenial(fault.New(commonv1.Reason_REASON_PROTOCOL_VIOLATION,
		"this session reported task attempts that nothing proves",
		fault.Remedy("report an attempt of before this session with its signed envelope; update the agent if it does not "+
			"know how")), ""))
}

func (r *Reporter) release(sessions []*roster.Session) {
	r.mu.Lock()
	for _, s := range sessions {
		delete(r.busy, s)
	}
	more := len(r.order) > 0
	r.mu.Unlock()
	if more {
		poke(r.wake)
	}
}

func allGone(sessions []*roster.Session) bool {
	return !slices.ContainsFunc(sessions, func(s *roster.Session) bool { return !s.Gone() })
}
