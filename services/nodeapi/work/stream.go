package work

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

const (
	// callWithin is how long a lease or a report may take.
	callWithin = 10 * time.Second
	// mostStreamed is the size of the largest request that goes over the stream: a larger one would keep others waiting,
	// and goes by a call of its own.
	mostStreamed = 256 << 10
	// openWithin is how long lifecycle may take to take a stream.
	openWithin = 5 * time.Second
	// pauseFirst and pauseMost bound the time between two streams; meanwhile every request goes by a call. A request that
	// ended its stream is made again by a call, so that if it is refused, only that call fails.
	pauseFirst, pauseMost = time.Second, 10 * time.Second
	// pauseUnknown is the time between two attempts if lifecycle's build has no streams.
	pauseUnknown = 30 * time.Second
	// endedMost bounds the ended sessions that wait to be named to lifecycle, and endedAtOnce those that one request
	// names. A session beyond endedMost is not named: lifecycle forgets it when its next task is refused.
	endedMost, endedAtOnce = 1 << 16, 512
)

// Connection is a stream of StreamWork.
type Connection interface {
	Send(*lifecyclev1.StreamWorkRequest) error
	Receive() (*lifecyclev1.StreamWorkResponse, error)
	CloseRequest() error
	CloseResponse() error
}

// Stream is a Lifecycle that sends requests over one stream while that stands, and as calls while it does not. It is
// safe for concurrent use.
type Stream struct {
	logger *slog.Logger
	calls  Lifecycle
	open   func(context.Context) (Connection, error)
	offer  func(*lifecyclev1.LeaseTasksResponse) []*lifecyclev1.NodeSession

	mu      sync.Mutex
	current *connection // nil: there is none
	ended   []*lifecyclev1.NodeSession
	wake    chan struct{} // some have ended
}

// Ended queues a session that has ended to be named to lifecycle, which then leases nothing more to it without a
// request.
func (s *Stream) Ended(nodeID, sessionID string) {
	s.mu.Lock()
	if s.current != nil && len(s.ended) < endedMost {
		s.ended = append(s.ended, &lifecyclev1.NodeSession{NodeId: nodeID, SessionId: sessionID})
	}
	s.mu.Unlock()
	poke(s.wake)
}

// nameEnded names ended sessions to lifecycle until ctx ends.
func (s *Stream) nameEnded(ctx context.Context, c *connection) {
	for {
		select {
		case <-s.wake:
		case <-ctx.Done():
			return
		}
		for sessions := s.takeEnded(); len(sessions) > 0; sessions = s.takeEnded() {
			s.endLeases(ctx, c, sessions)
		}
	}
}

func (s *Stream) takeEnded() []*lifecyclev1.NodeSession {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := min(len(s.ended), endedAtOnce)
	out := s.ended[:n:n]
	if s.ended = s.ended[n:]; len(s.ended) == 0 {
		s.ended = nil
	}
	return out
}

// NewStream makes a Stream. Until Run is called all requests go as calls. offer is called, one call at a time, with
// leases that lifecycle sends without a request; it returns the sessions that took nothing, to which lifecycle is then
// asked to lease nothing more without a request.
func NewStream(logger *slog.Logger, calls Lifecycle, open func(context.Context) (Connection, error),
	offer func(*lifecyclev1.LeaseTasksResponse) []*lifecyclev1.NodeSession,
) *Stream {
	return &Stream{logger: logger, calls: calls, open: open, offer: offer, wake: make(chan struct{}, 1)}
}

// connection is a stream that stands.
type connection struct {
	conn Connection
	end  context.CancelCauseFunc

	sending sync.Mutex

	mu      sync.Mutex
	last    int64
	waiting map[int64]chan *lifecyclev1.StreamWorkResponse // by request id; closed without an answer when the stream ends
	over    error                                          // why it ended; nil while it stands
	heard   time.Time                                      // when the last answer or offer came
}

// LeaseTasks implements Lifecycle.
func (s *Stream) LeaseTasks(ctx context.Context, req *lifecyclev1.LeaseTasksRequest) (*lifecyclev1.LeaseTasksResponse,
	error,
) {
	c := s.standing(req)
	if c == nil {
		return s.calls.LeaseTasks(ctx, req)
	}
	res, err := c.ask(ctx, &lifecyclev1.StreamWorkRequest{Request: &lifecyclev1.StreamWorkRequest_Lease{Lease: req}})
	return res.GetLease(), err
}

// ReportTasks implements Lifecycle.
func (s *Stream) ReportTasks(ctx context.Context,
	req *lifecyclev1.ReportTasksRequest,
) (*lifecyclev1.ReportTasksResponse, error) {
	c := s.standing(req)
	if c == nil {
		return s.calls.ReportTasks(ctx, req)
	}
	res, err := c.ask(ctx, &lifecyclev1.StreamWorkRequest{Request: &lifecyclev1.StreamWorkRequest_Report{Report: req}})
	return res.GetReport(), err
}

// standing returns the stream over which to send a request, nil if the request must go as a call.
func (s *Stream) standing(req proto.Message) *connection {
	if proto.Size(req) > mostStreamed {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.current
}

// Run keeps a stream until ctx ends.
func (s *Stream) Run(ctx context.Context) error {
	pause := pauseFirst
	for {
		stood, err := s.runOnce(ctx)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // asked to stop
		}
		switch {
		case connect.CodeOf(err) == connect.CodeUnimplemented || fault.Has(err, commonv1.Reason_REASON_UNIMPLEMENTED):
			pause = pauseUnknown
			s.logger.DebugContext(ctx, "lifecycle takes work by calls alone", slog.Any("error", err))
		case stood:
			pause = pauseFirst
			s.logger.InfoContext(ctx, "stream of work ended", slog.Any("error", err))
		default:
			pause = min(2*pause, pauseMost)
			s.logger.WarnContext(ctx, "stream of work not opened", slog.Any("error", err))
		}
		select {
		case <-time.After(pause/2 + rand.N(pause)):
		case <-ctx.Done():
			return nil
		}
	}
}

// runOnce opens a stream and delivers answers until it ends. It reports whether lifecycle accepted the stream.
func (s *Stream) runOnce(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	conn, err := s.open(ctx)
	if err != nil {
		return false, fmt.Errorf("open stream of work: %w", err)
	}
	c := &connection{conn: conn, end: cancel, waiting: map[int64]chan *lifecyclev1.StreamWorkResponse{}}
	// HTTP/2 does not look at ctx while it waits for the rest of a body, and Receive would hang.
	defer context.AfterFunc(ctx, func() { _ = c.conn.CloseRequest() })()
	defer func() { _ = c.conn.CloseResponse() }()
	late := time.AfterFunc(openWithin, func() { cancel(errors.New("lifecycle did not take the stream in time")) })
	defer late.Stop()
	if err := c.conn.Send(nil); err != nil { // the header alone: the server answers it
		_, received := c.conn.Receive() // which says why
		return false, fmt.Errorf("open stream of work: %w", errors.Join(received, err))
	}
	if _, err := c.conn.Receive(); err != nil {
		return false, fmt.Errorf("open stream of work: %w", because(ctx, err))
	}
	late.Stop()
	s.set(c)
	var ending sync.WaitGroup
	ending.Go(func() { s.nameEnded(ctx, c) })
	err = c.read(func(res *lifecyclev1.LeaseTasksResponse) {
		if in := s.offer(res); len(in) > 0 {
			ending.Go(func() { s.endLeases(ctx, c, in) })
		}
	})
	s.set(nil)
	err = because(ctx, err)
	c.fail(err)
	cancel(err)
	ending.Wait()
	return true, err
}

// endLeases asks lifecycle to lease nothing more without a request to sessions that took nothing or have ended. If the
// request fails, a session is named again after the next offer to it.
func (s *Stream) endLeases(ctx context.Context, c *connection, sessions []*lifecyclev1.NodeSession) {
	_, err := c.ask(
		ctx, &lifecyclev1.StreamWorkRequest{
			Request: &lifecyclev1.StreamWorkRequest_End{End: &lifecyclev1.EndLeasesRequest{Sessions: sessions}},
		},
	)
	if err != nil {
		s.logger.DebugContext(ctx, "sessions not named that take no leases", slog.Int("sessions", len(sessions)),
			slog.Any("error", err))
	}
}

// because returns why ctx ended, if it has, or err.
func because(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return err
}

func (s *Stream) set(c *connection) {
	s.mu.Lock()
	s.current, s.ended = c, nil // lifecycle forgets the sessions of an earlier stream when that stream ends
	s.mu.Unlock()
}

// read delivers answers to their requests until the stream ends, and passes leases without a request to offer.
func (c *connection) read(offer func(*lifecyclev1.LeaseTasksResponse)) error {
	for {
		res, err := c.conn.Receive()
		if err != nil {
			return fmt.Errorf("receive answers: %w", err)
		}
		c.mu.Lock()
		c.heard = time.Now()
		answer, ok := c.waiting[res.GetId()]
		delete(c.waiting, res.GetId())
		c.mu.Unlock()
		switch {
		case ok:
			answer <- res
		case res.GetId() == 0:
			offer(res.GetLease())
		default: // its request has been given up
		}
	}
}

// fail ends all waiting requests. As with a call whose answer is lost, it is not known whether lifecycle has carried
// them out.
func (c *connection) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.over = err
	for _, answer := range c.waiting {
		close(answer)
	}
	clear(c.waiting)
}

// ended returns the error of a request whose stream has ended.
func (c *connection) ended() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return fault.New(commonv1.Reason_REASON_UNAVAILABLE, "the stream of work ended before the answer", fault.Cause(c.over))
}

// ask sends a request and waits for its answer.
func (c *connection) ask(ctx context.Context, req *lifecyclev1.StreamWorkRequest) (*lifecyclev1.StreamWorkResponse,
	error,
) {
	within := callWithin
	if until, ok := ctx.Deadline(); ok {
		within = min(within, time.Until(until))
	}
	if within < time.Millisecond {
		return nil, fault.New(commonv1.Reason_REASON_DEADLINE_EXCEEDED, "", fault.Cause(context.DeadlineExceeded))
	}
	req.TimeoutMs = int32(within.Milliseconds()) // at most callWithin
	answer := make(chan *lifecyclev1.StreamWorkResponse, 1)
	c.mu.Lock()
	if c.over != nil {
		c.mu.Unlock()
		return nil, c.ended()
	}
	c.last++
	req.Id = c.last
	c.waiting[req.GetId()] = answer
	c.mu.Unlock()
	sent := time.Now()
	c.sending.Lock()
	err := c.conn.Send(req)
	c.sending.Unlock()
	if err != nil {
		c.end(fmt.Errorf("send work: %w", err))
	}
	timer := time.NewTimer(within)
	defer timer.Stop()
	select {
	case res, ok := <-answer:
		switch {
		case !ok:
			return nil, c.ended()
		case res.GetDenial() != nil:
			return nil, fault.FromDenial(res.GetDenial())
		default:
			return res, nil
		}
	case <-timer.C:
		err = context.DeadlineExceeded
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	c.mu.Lock()
	delete(c.waiting, req.GetId())
	silent := !c.heard.After(sent)
	c.mu.Unlock()
	if !errors.Is(err, context.DeadlineExceeded) {
		return nil, err
	}
	if silent { // the stream loses requests or their answers
		c.end(errors.New("the stream of work does not answer"))
	}
	return nil, fault.New(commonv1.Reason_REASON_DEADLINE_EXCEEDED, "", fault.Cause(err))
}
