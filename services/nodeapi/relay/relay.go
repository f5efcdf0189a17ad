// Package relay passes requests of other services on to agents whose sessions are on this replica, and passes the
// answers back. It stores neither.
//
// It accepts an agent's answer for the node of its session alone. The number of waiting requests is bounded, by node
// and in all, and so are the time that each may wait and how often the output of one workload is read. A slow agent
// fails the request and delays nothing else on its session, since nothing here blocks a session's reader or writer.
package relay

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
)

const (
	// OutputEvery is the least time between two reads of one workload's output.
	OutputEvery = 2 * time.Second
	// outputProtocol is the version from which agents answer OutputRequest.
	outputProtocol = 2
	// answerWithin bounds the wait for an agent.
	answerWithin = 5 * time.Second

	waitingOfNode = 4     // requests that wait for one agent
	waitingInAll  = 256   // and for all
	mostWorkloads = 16384 // workloads whose output was read within OutputEvery
)

// Session is an agent's session.
type Session interface {
	Send(frame *nodev1.ConnectResponse) bool
	Protocol() int32
	Gone() bool
}

// Deps of a relay.
type Deps struct {
	Logger *slog.Logger
	// Session returns the session of a node that is offered work here; nil if there is none.
	Session func(nodeID string) Session
}

// Relay is safe for concurrent use.
type Relay struct {
	deps Deps

	mu      sync.Mutex
	waiting map[string]*waiter // by request
	ofNode  map[string]int
	// read is when the output of a workload was read, for the reads within OutputEvery, at most mostWorkloads; order has
	// the same workloads, the earliest read first.
	read  map[workloadKey]time.Time
	order []workloadKey
}

type workloadKey struct{ workspaceID, workload string }

type waiter struct {
	nodeID string
	sess   Session
	answer chan *nodev1.OutputChunk // has room for one
	gone   chan struct{}            // closed when the session has ended
}

// New makes a relay.
func New(deps Deps) *Relay {
	return &Relay{deps: deps, waiting: map[string]*waiter{}, ofNode: map[string]int{}, read: map[workloadKey]time.Time{}}
}

// ReadOutput asks the agent of a node for a piece of a workload's output.
func (r *Relay) ReadOutput(ctx context.Context, req *nodev1.ReadOutputRequest) (*nodev1.ReadOutputResponse, error) {
	sess := r.deps.Session(req.GetNodeId())
	if sess == nil {
		return nil, fault.New(commonv1.Reason_REASON_NODE_NOT_CONNECTED, "")
	}
	if sess.Protocol() < outputProtocol {
		return nil, fault.New(commonv1.Reason_REASON_AGENT_OUTDATED,
			"the agent of the node is of a version that cannot be asked for output")
	}
	id := ids.New()
	wait, err := r.begin(id, sess, req)
	if err != nil {
		return nil, err
	}
	defer r.end(id)
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	sess.Send(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_OutputRequest{OutputRequest: &nodev1.OutputRequest{
		RequestId: id, WorkspaceId: req.GetWorkspaceId(), Epoch: req.GetEpoch(), Workload: req.GetWorkload(),
		Previous: req.GetPrevious(), From: req.GetFrom(),
		MaxBytes: req.GetMaxBytes(),
	}}})
	if sess.Gone() { // Gone may have been called before the request was registered
		return nil, fault.New(commonv1.Reason_REASON_NODE_NOT_CONNECTED, "")
	}
	select {
	case chunk := <-wait.answer:
		if chunk.GetDenied() != nil {
			return nil, refusal(chunk.GetDenied())
		}
		if chunk.GetOutput() == nil {
			return nil, fault.New(commonv1.Reason_REASON_UNAVAILABLE, "the agent's answer is empty")
		}
		return &nodev1.ReadOutputResponse{Output: chunk.GetOutput()}, nil
	case <-wait.gone:
		return nil, fault.New(commonv1.Reason_REASON_NODE_NOT_CONNECTED,
			"the session of the node's agent ended before it answered")
	case <-ctx.Done():
		return nil, fault.New(commonv1.Reason_REASON_DEADLINE_EXCEEDED, "the agent of the node did not answer in time",
			fault.WithAction(commonv1.Action_ACTION_WAIT), fault.RetryAfter(OutputEvery),
			fault.Remedy("ask again; if it stays, look at the node: gpuaas nodes get"))
	}
}

// refusal returns an agent's denial as a fault, if its reason is one that an agent may give; any other becomes
// unavailable.
func refusal(d *commonv1.Denial) error {
	switch d.GetReason() { // everything else is not an agent's to say
	case commonv1.Reason_REASON_NOT_FOUND, commonv1.Reason_REASON_INVALID_ARGUMENT, commonv1.Reason_REASON_AGENT_BUSY,
		commonv1.Reason_REASON_UNAVAILABLE, commonv1.Reason_REASON_AGENT_OUTDATED:
		return fault.FromDenial(d)
	default:
		return fault.New(commonv1.Reason_REASON_UNAVAILABLE, "the agent could not read the output",
			fault.Cause(errors.New(d.GetMessage())))
	}
}

// begin registers a request. It returns a fault if too many requests wait, if the workload's output was read less than
// OutputEvery ago, or if the outputs of too many workloads were.
func (r *Relay) begin(id string, sess Session, req *nodev1.ReadOutputRequest) (*waiter, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	key, now := workloadKey{req.GetWorkspaceId(), req.GetWorkload()}, time.Now()
	r.forget(now)
	if left := OutputEvery - now.Sub(r.read[key]); left > 0 {
		return nil, fault.New(commonv1.Reason_REASON_RATE_LIMITED,
			"the output of this workload was read less than two seconds ago",
			fault.RetryAfter(max(left, 10*time.Millisecond)), fault.Remedy("ask again after the given time"))
	}
	if len(r.waiting) >= waitingInAll || r.ofNode[req.GetNodeId()] >= waitingOfNode {
		return nil, fault.New(commonv1.Reason_REASON_OVERLOADED, "too many requests for output wait here",
			fault.RetryAfter(OutputEvery))
	}
	if len(r.read) >= mostWorkloads {
		return nil, fault.New(commonv1.Reason_REASON_OVERLOADED, "the outputs of too many workloads are read here",
			fault.RetryAfter(max(OutputEvery-now.Sub(r.read[r.order[0]]), 10*time.Millisecond)))
	}
	r.read[key] = now
	r.order = append(r.order, key)
	w := &waiter{nodeID: req.GetNodeId(), sess: sess, answer: make(chan *nodev1.OutputChunk, 1), gone: make(chan struct{})}
	r.waiting[id] = w
	r.ofNode[w.nodeID]++
	return w, nil
}

// forget removes the reads that no longer delay another one. The caller holds the lock.
func (r *Relay) forget(now time.Time) {
	for len(r.order) > 0 && now.Sub(r.read[r.order[0]]) >= OutputEvery {
		delete(r.read, r.order[0])
		r.order = r.order[1:]
	}
}

func (r *Relay) end(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	w := r.waiting[id]
	delete(r.waiting, id)
	if r.ofNode[w.nodeID]--; r.ofNode[w.nodeID] <= 0 {
		delete(r.ofNode, w.nodeID)
	}
}

// Chunk takes the answer of a node's agent. It does not block; an answer for which no request waits is dropped.
func (r *Relay) Chunk(nodeID string, chunk *nodev1.OutputChunk) {
	r.mu.Lock()
	w := r.waiting[chunk.GetRequestId()]
	r.mu.Unlock()
	if w == nil || w.nodeID != nodeID {
		return
	}
	select {
	case w.answer <- chunk:
	default:
	}
}

// Gone ends the requests that wait for an answer over a session that has ended.
func (r *Relay) Gone(nodeID string, sess Session) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ofNode[nodeID] == 0 {
		return
	}
	for _, w := range r.waiting {
		if w.sess != sess {
			continue
		}
		select {
		case <-w.gone:
		default:
			close(w.gone)
		}
	}
}
