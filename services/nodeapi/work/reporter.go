package work

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/services/nodeapi/authority"
	"github.com/gpuaas/mesh/services/nodeapi/batch"
	"github.com/gpuaas/mesh/services/nodeapi/roster"
)

const (
	reportNodes = 64 // nodes in one report
	reportLanes = 2  // reports under way at once
	// maxPending is how many frames may wait for a report; past it, reading stops, and flow control stops the agents from
	// sending.
	maxPending    = 16384
	perNodeFrames = 1024 // frames of one kind of one node in one report

	// lazyWait is how long an update about delivery, start or progress may wait for the result of its task, so that a
	// short task costs one report and not two.
	lazyWait = 100 * time.Millisecond

	maxRefusals = 5 // refused reports that end a session

	maxPendingBytes = 64 << 20 // bytes of results that may wait
	perNodeBytes    = 1 << 20  // bytes of results of one node in one report, approximately
	reportBytes     = 4 << 20  // bytes of results in one report, approximately: lifecycle reads at most 8 MiB
)

// Reporter gathers the agents' updates about their tasks into few transactions: updates that come while a report is
// under way go with the next one.
type Reporter struct {
	replicaID string
	logger    *slog.Logger
	view      *authority.View
	lifecycle Lifecycle
	metrics   Metrics

	mu      sync.Mutex
	pending map[*roster.Session]*pending
	order   []*roster.Session
	// busy has the sessions of which a report is under way; no other report of them is begun, so that their frames stay in
	// order.
	busy   map[*roster.Session]bool
	frames int
	bytes  int
	room   chan struct{} // closed when there is room again
	wake   chan struct{}
}

// NewReporter makes a reporter.
func NewReporter(logger *slog.Logger, replicaID string, v *authority.View, lc Lifecycle, m Metrics) *Reporter {
	return &Reporter{
		replicaID: replicaID, logger: logger, view: v, lifecycle: lc, metrics: m,
		pending: map[*roster.Session]*pending{}, busy: map[*roster.Session]bool{}, wake: make(chan struct{}, 1),
	}
}

// Delivered takes the update that tasks are in the agent's ledger, with the signed envelopes of those from before the
// session.
func (r *Reporter) Delivered(ctx context.Context, s *roster.Session, f *nodev1.TaskDelivered) error {
	bytes := 0
	if len(f.GetSigned()) > 0 {
		bytes = proto.Size(f)
	}
	return r.add(ctx, s, len(f.GetTasks()), bytes, func(n *lifecyclev1.NodeReport) {
		n.Delivered = append(n.Delivered, f.GetTasks()...)
		n.Signed = append(n.Signed, f.GetSigned()...)
	})
}

// Started takes the update that a task has started.
func (r *Reporter) Started(ctx context.Context, s *roster.Session, f *nodev1.TaskStarted) error {
	return r.add(ctx, s, 1, 0, func(n *lifecyclev1.NodeReport) { n.Started = append(n.Started, f) })
}

// Progress takes an activity's own update that it advances. It replaces an earlier one of the same task that was not
// reported yet.
func (r *Reporter) Progress(ctx context.Context, s *roster.Session, f *nodev1.TaskProgress) error {
	return r.add(ctx, s, 1, 0, func(n *lifecyclev1.NodeReport) {
		for i, old := range n.GetProgress() {
			if old.GetTask().GetTaskId() == f.GetTask().GetTaskId() {
				n.Progress[i] = f
				return
			}
		}
		n.Progress = append(n.Progress, f)
	})
}

// Result takes the terminal update of a task.
func (r *Reporter) Result(ctx context.Context, s *roster.Session, f *nodev1.TaskResult) error {
	return r.add(ctx, s, 1, proto.Size(f), func(n *lifecyclev1.NodeReport) { n.Results = append(n.Results, f) })
}

// add waits for room, so that flow control stops an agent which sends more than can be reported.
func (r *Reporter) add(ctx context.Context, s *roster.Session, frames, bytes int,
	put func(*lifecyclev1.NodeReport),
) error {
	for {
		r.mu.Lock()
		if r.frames < maxPending && r.bytes < maxPendingBytes && !r.pending[s].full() {
			break
		}
		if r.room == nil {
			r.room = make(chan struct{})
		}
		room := r.room
		r.mu.Unlock()
		select {
		case <-room:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	p := r.pending[s]
	if p == nil {
		p = &pending{since: time.Now(), report: &lifecyclev1.NodeReport{
			NodeId: s.Identity.NodeID, NodeInstanceId: s.InstanceID(), SessionId: s.ID, Generation: s.Generation(),
			LedgerId: s.LedgerID(),
		}}
		r.pending[s] = p
		r.order = append(r.order, s)
	}
	put(p.report)
	p.frames += frames
	p.bytes += bytes
	r.frames += frames
	r.bytes += bytes
	r.mu.Unlock()
	r.poke()
	return nil
}

// pending is the updates of one session that have not been reported.
type pending struct {
	report *lifecyclev1.NodeReport
	since  time.Time
	frames int
	bytes  int
}

// due returns when the updates must be reported at the latest: at once if there are results or many frames, else after
// lazyWait.
func (p *pending) due() time.Time {
	if len(p.report.GetResults()) > 0 || p.frames >= perNodeFrames/2 {
		return p.since
	}
	return p.since.Add(lazyWait)
}

// part splits updates that are due into those to report now and those that go on waiting, nil if there are none.
// Results go with all other updates of their tasks; updates of other tasks wait for their results until lazyWait has
// passed. Tasks are independent of each other, so their order may change. The updates of one task are never separated
// from each other, or from the envelopes that prove them.
func (p *pending) part(now time.Time) (*pending, *pending) {
	if p.frames >= perNodeFrames/2 || len(p.report.GetSigned()) > 0 || !p.since.Add(lazyWait).After(now) {
		return p, nil
	}
	ended := make(map[string]bool, len(p.report.GetResults()))
	for _, r := range p.report.GetResults() {
		ended[r.GetTask().GetTaskId()] = true
	}
	n := p.report
	rest := &lifecyclev1.NodeReport{
		NodeId: n.GetNodeId(), NodeInstanceId: n.GetNodeInstanceId(), SessionId: n.GetSessionId(),
		Generation: n.GetGeneration(), LedgerId: n.GetLedgerId(),
	}
	n.Delivered, rest.Delivered = divide(n.GetDelivered(),
		func(ref *nodev1.TaskRef) bool { return ended[ref.GetTaskId()] })
	n.Started, rest.Started = divide(n.GetStarted(),
		func(f *nodev1.TaskStarted) bool { return ended[f.GetTask().GetTaskId()] })
	n.Progress, rest.Progress = divide(n.GetProgress(),
		func(f *nodev1.TaskProgress) bool { return ended[f.GetTask().GetTaskId()] })
	frames := len(rest.GetDelivered()) + len(rest.GetStarted()) + len(rest.GetProgress())
	if frames == 0 {
		return p, nil
	}
	return &pending{report: n, since: p.since, frames: p.frames - frames, bytes: p.bytes},
		&pending{report: rest, since: p.since, frames: frames}
}

// divide returns the elements for which goes returns true, and the others.
func divide[T any](all []T, goes func(T) bool) ([]T, []T) {
	var taken, left []T
	for _, v := range all {
		if goes(v) {
			taken = append(taken, v)
		} else {
			left = append(left, v)
		}
	}
	return taken, left
}

func (p *pending) full() bool {
	if p == nil {
		return false
	}
	n := p.report
	return p.bytes >= perNodeBytes || len(n.GetDelivered()) >= perNodeFrames-256 || len(n.GetStarted()) >= perNodeFrames ||
		len(n.GetProgress()) >= perNodeFrames || len(n.GetResults()) >= perNodeFrames
}

func (r *Reporter) poke() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Run reports until ctx ends.
func (r *Reporter) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	lanes := make(chan struct{}, reportLanes)
	var pace pacer
	lazy := time.NewTimer(lazyWait)
	defer lazy.Stop()
	for {
		select {
		case <-r.wake:
		case <-lazy.C:
		case <-ctx.Done():
			return nil
		}
		for {
			select {
			case lanes <- struct{}{}:
			case <-ctx.Done():
				return nil
			}
			// While the view is stale, results wait and are not acknowledged.
			if r.view.WaitFresh(ctx) != nil {
				return nil //nolint:nilerr // ctx ended
			}
			if !pace.wait(ctx) {
				return nil
			}
			sessions, reports, wait := r.take(time.Now())
			if len(reports) == 0 {
				<-lanes
				if wait > 0 {
					lazy.Reset(wait)
				}
				break
			}
			pace.begun()
			wg.Go(func() {
				defer func() { <-lanes }()
				r.send(ctx, sessions, reports)
			})
		}
	}
}

// take returns the reports to send now with their sessions, and the time until the next of the remaining updates is
// due; zero if none remains that is not due.
func (r *Reporter) take(now time.Time) ([]*roster.Session, []*lifecyclev1.NodeReport, time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var sessions []*roster.Session
	var reports []*lifecyclev1.NodeReport
	bytes := 0
	var wait time.Duration
	rest := r.order[:0]
	for _, s := range r.order {
		p := r.pending[s]
		if due := p.due().Sub(now); due > 0 {
			if wait == 0 || due < wait {
				wait = due
			}
			rest = append(rest, s)
			continue
		}
		if r.busy[s] || len(reports) >= reportNodes || bytes >= reportBytes {
			rest = append(rest, s)
			continue
		}
		taken, left := p.part(now)
		if left == nil {
			delete(r.pending, s)
		} else {
			r.pending[s] = left
			rest = append(rest, s) // it waits at least until the report that goes now has ended
		}
		p = taken
		r.busy[s] = true
		r.frames -= p.frames
		r.bytes -= p.bytes
		bytes += p.bytes
		sessions = append(sessions, s)
		reports = append(reports, p.report)
	}
	clear(r.order[len(rest):])
	r.order = rest
	if r.room != nil {
		close(r.room)
		r.room = nil
	}
	return sessions, reports, wait
}

func (r *Reporter) send(ctx context.Context, sessions []*roster.Session, reports []*lifecyclev1.NodeReport) {
	if !r.deliver(ctx, sessions, reports) {
		r.deliverParts(ctx, sessions, reports)
	}
}

// deliverParts sends a batch that timed out as two of half the size, since the same batch would be no faster. A node
// whose report times out alone is given up, so that it delays no other; its agent sends its results again after a
// while.
func (r *Reporter) deliverParts(ctx context.Context, sessions []*roster.Session, reports []*lifecyclev1.NodeReport) {
	half := len(reports) / 2
	if half == 0 {
		r.release(sessions)
		return
	}
	for _, part := range [][2]int{{0, half}, {half, len(reports)}} {
		if !r.deliver(ctx, sessions[part[0]:part[1]], reports[part[0]:part[1]]) {
			r.deliverParts(ctx, sessions[part[0]:part[1]], reports[part[0]:part[1]])
		}
	}
}

// deliver sends reports until lifecycle has taken them or all their sessions have ended, and then releases the
// sessions. It returns false, with the sessions still busy, if a batch timed out that may be sent in smaller parts.
func (r *Reporter) deliver(ctx context.Context, sessions []*roster.Session, reports []*lifecyclev1.NodeReport) bool {
	pause := 50 * time.Millisecond
	for {
		res, err := r.call(ctx, reports)
		switch {
		case err == nil:
			r.acknowledge(ctx, sessions, res)
			r.release(sessions)
			return true
		case ctx.Err() != nil:
			r.release(sessions)
			return true
		case batch.Refused(err):
			r.isolate(ctx, sessions, reports, err)
			r.release(sessions)
			return true
		}
		r.logger.WarnContext(ctx, "report not taken", slog.Int("nodes", len(reports)), slog.Any("error", err))
		if allGone(sessions) { // the agents send their results again over their next sessions
			r.release(sessions)
			return true
		}
		if timedOut(err) {
			return false
		}
		select {
		case <-time.After(pause):
			pause = min(2*pause, time.Second)
		case <-ctx.Done():
			r.release(sessions)
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
		sessions[i].Send(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_TaskResultAck{TaskResultAck: &nodev1.TaskResultAck{Tasks: n.GetAcknowledged()}}})
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
		s.Send(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_TaskReportRefused{TaskReportRefused: &nodev1.TaskReportRefused{
			Tasks: []*nodev1.TaskRef{one.GetTask()}, Denial: one.GetDenial(), EnvelopeWanted: one.GetEnvelopeWanted(),
		}}})
	}
	if total < maxRefusals {
		return
	}
	r.logger.WarnContext(ctx, "session reports attempts that nothing proves", slog.String("node_id", s.Identity.NodeID),
		slog.String("session_id", s.ID),
		slog.Int("refused", total))
	s.Close(fault.ToDenial(fault.New(commonv1.Reason_REASON_PROTOCOL_VIOLATION,
		"this session reported task attempts that nothing proves",
		fault.Remedy("report an attempt of before this session with its signed envelope; update the agent if it does not know how")), ""))
}

func (r *Reporter) release(sessions []*roster.Session) {
	r.mu.Lock()
	for _, s := range sessions {
		delete(r.busy, s)
	}
	more := len(r.order) > 0
	r.mu.Unlock()
	if more {
		r.poke()
	}
}

func allGone(sessions []*roster.Session) bool {
	for _, s := range sessions {
		if !s.Gone() {
			return false
		}
	}
	return true
}
