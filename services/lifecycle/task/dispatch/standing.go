package dispatch

import (
	"context"
	"log/slog"
	"sync"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

const (
	// outletMost bounds the tasks that wait to be offered over one stream. A task beyond it is leased but not offered now;
	// it is offered again later, as one whose offer was lost.
	outletMost = 4096
	// outletAtOnce bounds the tasks of one message; see fitting too.
	outletAtOnce = 64
	// outletBytes bounds the payloads of the tasks that wait.
	outletBytes = 32 << 20
	// underWay is how long a task that was leased as it was queued keeps others of its node from being leased so, if no
	// report comes. After that the session is dropped.
	underWay = 2 * time.Second
)

// standingLeases are the sessions that tasks may be leased to as they are queued, by node: their replica requested that
// over a stream that is still open. They are a hint: the gate decides, under its lock, whether a session may lease.
type standingLeases struct {
	underWay time.Duration

	mu    sync.Mutex
	nodes map[string]standingLease
}

// standingLease is the session of a node in standingLeases, with the outlet to its replica.
type standingLease struct {
	session    string
	generation int64
	out        *outlet
	// until is how long the task that was last leased as it was queued may be under way; the node's next report clears it.
	// Tasks that come meanwhile are queued and leased together, which costs less for a node with many tasks than leasing
	// one after another.
	until time.Time
}

// outlet takes leased tasks to the replica of one stream.
type outlet struct {
	closed bool // its stream has ended; guarded by the mutex of standingLeases

	mu      sync.Mutex
	waiting []picked
	bytes   int // of the payloads of waiting
	wake    chan struct{}
}

func newOutlet() *outlet { return &outlet{wake: make(chan struct{}, 1)} }

// has reports whether a node has a session that tasks may be leased to as they are queued.
func (s *standingLeases) has(nodeID string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.nodes[nodeID].out != nil
}

// reserve returns the session that a node's next task may be leased to, and keeps it from other tasks until a report of
// the node or giveBack; its out is nil if there is no such session, or a task is under way to it.
func (s *standingLeases) reserve(nodeID string, now time.Time) standingLease {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.nodes[nodeID]
	if at.out == nil || now.Before(at.until) {
		return standingLease{}
	}
	// no report came: offers may be lost on this stream, and the lease that repeats this one adds the session again
	if !at.until.IsZero() {
		delete(s.nodes, nodeID)
		return standingLease{}
	}
	at.until = now.Add(s.underWay)
	s.nodes[nodeID] = at
	return at
}

// giveBack undoes reserve for a session to which no task was leased in the end, unless the session has been reserved
// anew or is another one.
func (s *standingLeases) giveBack(nodeID string, reserved standingLease) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if at := s.nodes[nodeID]; reserved.out != nil && at == reserved {
		at.until = time.Time{}
		s.nodes[nodeID] = at
	}
}

// reported notes that nodes have reported on their tasks, so that the next task may be leased as it is queued.
func (s *standingLeases) reported(reports []*lifecyclev1.NodeReport) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range reports {
		if at, ok := s.nodes[r.GetNodeId()]; ok {
			at.until = time.Time{}
			s.nodes[r.GetNodeId()] = at
		}
	}
}

// put adds the sessions of a lease that their gates did not refuse, unless the stream has ended meanwhile.
func (s *standingLeases) put(out *outlet, req *lifecyclev1.LeaseTasksRequest, refused []*lifecyclev1.NodeRefusal) {
	no := make(map[string]bool, len(refused))
	for _, r := range refused {
		no[r.GetNodeId()] = true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if out.closed {
		return
	}
	if s.nodes == nil {
		s.nodes = map[string]standingLease{}
	}
	for _, n := range req.GetNodes() {
		if !no[n.GetNodeId()] && n.GetGeneration() >= s.nodes[n.GetNodeId()].generation {
			s.nodes[n.GetNodeId()] = standingLease{session: n.GetSessionId(), generation: n.GetGeneration(), out: out}
		}
	}
}

// drop removes a session that its gate has refused, unless another one has taken its place. The node's next lease,
// which takes the task instead, adds it again.
func (s *standingLeases) drop(nodeID string, refused standingLease) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if at := s.nodes[nodeID]; at.out == refused.out && at.session == refused.session &&
		at.generation == refused.generation {
		delete(s.nodes, nodeID)
	}
}

// end removes the given sessions of a stream.
func (s *standingLeases) end(out *outlet, sessions []*lifecyclev1.NodeSession) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, one := range sessions {
		if at := s.nodes[one.GetNodeId()]; at.out == out && at.session == one.GetSessionId() {
			delete(s.nodes, one.GetNodeId())
		}
	}
}

// remove removes all sessions of a stream that has ended.
func (s *standingLeases) remove(out *outlet) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out.closed = true
	for node, at := range s.nodes {
		if at.out == out {
			delete(s.nodes, node)
		}
	}
}

// add appends tasks to be offered, as far as there is room.
func (o *outlet) add(offers ...picked) {
	o.mu.Lock()
	for _, offer := range offers {
		if len(o.waiting) < outletMost && o.bytes+len(offer.payload) <= outletBytes {
			o.waiting, o.bytes = append(o.waiting, offer), o.bytes+len(offer.payload)
		}
	}
	o.mu.Unlock()
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// take removes and returns the tasks of the next message; none if no task waits.
func (o *outlet) take() []picked {
	o.mu.Lock()
	defer o.mu.Unlock()
	n := fitting(o.waiting[:min(len(o.waiting), outletAtOnce)])
	out := o.waiting[:n:n]
	for _, offer := range out {
		o.bytes -= len(offer.payload)
	}
	if o.waiting = o.waiting[n:]; len(o.waiting) == 0 {
		o.waiting = nil
	}
	return out
}

// offerStanding opens, signs and sends the tasks that were leased to sessions of a stream as they were queued, until
// ctx ends or the stream cannot be written to. A task whose environment values do not open is left out: the lease that
// would offer it again ends it.
func (s *Server) offerStanding(ctx context.Context, out *outlet, send func(*lifecyclev1.StreamWorkResponse) error) {
	for {
		select {
		case <-out.wake:
		case <-ctx.Done():
			return
		}
		for offers := out.take(); len(offers) > 0; offers = out.take() {
			opened := make([]picked, 0, len(offers))
			for _, one := range offers {
				var err error
				if one.payload, err = s.openPayload(one); err != nil {
					s.deps.Logger.WarnContext(ctx, "leased task not offered", slog.String("task_id", one.TaskID), obs.Err(err))
					continue
				}
				opened = append(opened, one)
			}
			res, err := s.sign(ctx, &lifecyclev1.LeaseTasksResponse{}, opened, nil)
			if err != nil {
				s.deps.Logger.WarnContext(ctx, "leased tasks not offered", obs.Err(err))
				continue
			}
			if len(res.GetTasks()) == 0 {
				continue
			}
			if send(&lifecyclev1.StreamWorkResponse{Response: &lifecyclev1.StreamWorkResponse_Lease{Lease: res}}) != nil {
				return // the reader of the stream sees it end too
			}
		}
	}
}

// dispatched returns the row of a task that was leased as it was queued.
func dispatched(r task.Row, generation int64) task.Row {
	r.State, r.Attempt, r.SessionEpoch = commonv1.TaskState_TASK_STATE_DISPATCHED, 1, generation
	return r
}
