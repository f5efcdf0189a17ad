package work

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/services/nodeapi/authority"
	"github.com/gpuaas/mesh/services/nodeapi/roster"
)

const (
	reportNodes = 64 // nodes in one report
	reportLanes = 2  // reports under way at once
	// maxPending is how many frames may wait for a report; past it, reading stops, and flow control stops the agents from
	// sending, for at most stallAfter where results are read.
	maxPending    = 16384
	perNodeFrames = 1024 // frames of one kind of one node in one report

	// lazyWait is how long an update about delivery, start or progress may wait for the result of its task, so that a
	// short task costs one report and not two.
	lazyWait = 100 * time.Millisecond

	// stallAfter is how long updates wait before results that find no room are dropped: less than the time for which an
	// agent waits for a reply to its heartbeats.
	stallAfter = 5 * time.Second

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
	return r.add(ctx, s, false, func(n *lifecyclev1.NodeReport) (int, int) {
		n.Delivered = append(n.Delivered, f.GetTasks()...)
		n.Signed = append(n.Signed, f.GetSigned()...)
		return len(f.GetTasks()), bytes
	})
}

// Started takes the update that a task has started.
func (r *Reporter) Started(ctx context.Context, s *roster.Session, f *nodev1.TaskStarted) error {
	return r.add(ctx, s, false, func(n *lifecyclev1.NodeReport) (int, int) {
		n.Started = append(n.Started, f)
		return 1, 0
	})
}

// Progress takes an activity's own update that it advances. It replaces an earlier one of the same task that was not
// reported yet.
func (r *Reporter) Progress(ctx context.Context, s *roster.Session, f *nodev1.TaskProgress) error {
	return r.add(ctx, s, false, func(n *lifecyclev1.NodeReport) (int, int) {
		for i, old := range n.GetProgress() {
			if old.GetTask().GetTaskId() == f.GetTask().GetTaskId() {
				n.Progress[i] = f
				return 0, 0
			}
		}
		n.Progress = append(n.Progress, f)
		return 1, 0
	})
}

// Result takes the terminal update of a task. It replaces an earlier one of the same attempt that was not reported yet:
// an agent sends a result again until it is acknowledged. While nothing is reported, a result that finds no room is
// dropped, since the agent keeps it and sends it again.
func (r *Reporter) Result(ctx context.Context, s *roster.Session, f *nodev1.TaskResult) error {
	return r.add(ctx, s, true, func(n *lifecyclev1.NodeReport) (int, int) {
		size := proto.Size(f)
		for i, old := range n.GetResults() {
			if old.GetTask().GetTaskId() == f.GetTask().GetTaskId() &&
				old.GetTask().GetAttempt() == f.GetTask().GetAttempt() {
				n.Results[i] = f
				return 0, size - proto.Size(old)
			}
		}
		n.Results = append(n.Results, f)
		return 1, size
	})
}

// add waits for room, so that flow control stops an agent which sends more than can be reported. put adds an update to
// the report of the session, and returns how many frames and bytes the report has more. An update that may be dropped
// waits only while reports are taken: a reader that waits reads no heartbeats.
func (r *Reporter) add(ctx context.Context, s *roster.Session, drop bool,
	put func(*lifecyclev1.NodeReport) (frames, bytes int),
) error {
	for {
		r.mu.Lock()
		if r.frames < maxPending && r.bytes < maxPendingBytes && !r.pending[s].full() {
			break
		}
		var stalls <-chan time.Time
		if drop {
			left := time.Until(r.waitsSinceLocked(s).Add(stallAfter))
			if left <= 0 {
				r.mu.Unlock()
				return nil
			}
			stalls = time.After(left)
		}
		if r.room == nil {
			r.room = make(chan struct{})
		}
		room := r.room
		r.mu.Unlock()
		select {
		case <-room:
		case <-stalls:
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
	frames, bytes := put(p.report)
	p.frames += frames
	p.bytes += bytes
	r.frames += frames
	r.bytes += bytes
	r.mu.Unlock()
	poke(r.wake)
	return nil
}

// waitsSinceLocked returns since when the updates wait that leave no room for one of s: its own, else the oldest.
func (r *Reporter) waitsSinceLocked(s *roster.Session) time.Time {
	if p := r.pending[s]; p.full() {
		return p.since
	}
	return r.pending[r.order[0]].since
}

// poke wakes the loop that waits on a channel with room for one; one that is awake goes round once more.
func poke(wake chan<- struct{}) {
	select {
	case wake <- struct{}{}:
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
				return nil
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
