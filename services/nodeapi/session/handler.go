package session

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"buf.build/go/protovalidate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/stack"
	"github.com/gpuaas/mesh/internal/wallclock"
	"github.com/gpuaas/mesh/services/nodeapi/roster"
	"github.com/gpuaas/mesh/services/nodeapi/session/admission"
	"github.com/gpuaas/mesh/services/nodeapi/session/bounds"
	"github.com/gpuaas/mesh/services/nodeapi/session/skew"
)

// handler serves one stream from its first frame to its end. It is the only reader; its fields need no lock.
type handler struct {
	server   *Server
	stream   grpc.BidiStreamingServer[nodev1.ConnectRequest, nodev1.ConnectResponse]
	sess     *roster.Session
	*opening // nil once the session was admitted
	pace     pace
	renewing atomic.Bool // a renewal is under way
	keys     *agentKeys

	clock skew.Meter  // of the agent's host
	host  hostChanges // that this session has reported
	diags diagnosed   // by this session's reports

	observations spending // of the agent's observations

	overBudget bool // the opening was refused by the budget and did not reach recovery
}

// opening is what a session needs until it is admitted, but not for the hours after that.
type opening struct {
	leaf  *x509.Certificate
	who   payer
	conn  *admission.Conn
	hello *nodev1.Hello
	// What Welcome carried: the join state, the frames of the lists of keys and of roots, and the policy.
	join           []byte
	listed, rooted *nodev1.ConnectResponse
	policy         *commonv1.NodePolicy
}

func (h *handler) run(ctx context.Context) error {
	err := aside(func() error { return h.open(ctx) })
	if err == nil {
		err = h.serve(ctx)
		h.diagnose(h.diags.takeWaiting()) // the agent does not send them again
	}
	if err == nil || errors.Is(err, errHungUp) || errors.Is(err, io.EOF) {
		return nil
	}
	tooLarge := fault.Has(err, commonv1.Reason_REASON_FRAME_TOO_LARGE)
	if ctx.Err() != nil && !tooLarge {
		return nil // the connection is gone, and with it the way to answer
	}
	if h.sess.Gone() {
		return fault.ToGRPC(err, "")
	}
	d := fault.ToDenial(err, "")
	h.server.deps.Metrics.Refused(names.Of(d.GetReason()))
	level := slog.LevelInfo
	if h.overBudget { // a client that opens too often must not fill the log
		level = slog.LevelDebug
	}
	if _, panicked := errors.AsType[*panicError](err); panicked {
		level = slog.LevelError
	}
	h.server.deps.Logger.Log(ctx, level, "session refused", slog.String("node_id", h.sess.Identity.NodeID),
		slog.String("session_id", h.sess.ID), slog.Any("error", err))
	if !tooLarge { // else grpc has sent the stream's status already, and nothing comes after that
		h.sess.SendInline(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_Denied{Denied: d}})
	}
	return fault.ToGRPC(err, "")
}

// aside runs f in a goroutine of its own and waits for it. Opening a session needs a deep stack, and a stack that has
// grown lives as long as its goroutine. The goroutine that waits for the agent's next frame, for hours, is to have a
// small stack.
func aside(f func() error) error {
	done := make(chan error, 1)
	go func() {
		stack.Grow()
		defer func() {
			if p := recover(); p != nil {
				done <- fault.New(commonv1.Reason_REASON_INTERNAL, "", fault.Cause(&panicError{value: p, stack: debug.Stack()}))
			}
		}()
		done <- f()
	}()
	return <-done
}

// panicError is a panic of an opening, with the stack of where it happened.
type panicError struct {
	value any
	stack []byte
}

func (e *panicError) Error() string { return fmt.Sprintf("panic: %v\n%s", e.value, e.stack) }

// recv reads and validates one frame.
func (h *handler) recv() (*nodev1.ConnectRequest, error) {
	frame, err := h.stream.Recv()
	if status.Code(err) == codes.ResourceExhausted {
		return nil, fault.New(commonv1.Reason_REASON_FRAME_TOO_LARGE, "", fault.WithAction(commonv1.Action_ACTION_WAIT),
			fault.RetryAfter(invalidWait), fault.Cause(err))
	}
	if err != nil {
		return nil, err
	}
	now := wallclock.Now()
	h.sess.Seen(now)
	if !h.pace.frame(now, h.server.lim.FramesPerSecond) {
		return nil, fault.New(commonv1.Reason_REASON_RATE_LIMITED, "this session sends too many frames",
			fault.RetryAfter(5*time.Second))
	}
	cut, err := checked(h.server.validate, frame, h.server.cfg.Clock.Now())
	if err != nil {
		return nil, err
	}
	h.server.deps.Metrics.Cut(cut)
	return frame, nil
}

// checked validates a frame, and cleans it of what cannot be stored or is no text for people. It returns what it
// cut of the host's record and facts.
func checked(v protovalidate.Validator, frame *nodev1.ConnectRequest, now time.Time) (bounds.Cut, error) {
	if hb := frame.GetHeartbeat(); hb != nil && hb.GetChangedFacts() == nil {
		return bounds.Cut{}, nil // it has no field that could be invalid
	}
	if err := v.Validate(frame); err != nil {
		// The action is wait and not stop: an agent of another version may succeed after an update of either side.
		return bounds.Cut{}, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "the frame is not valid",
			fault.WithAction(commonv1.Action_ACTION_WAIT),
			fault.RetryAfter(invalidWait), fault.Cause(err))
	}
	return bounds.Reported(frame, now), nil
}

// serve reads an admitted session until it ends.
func (h *handler) serve(ctx context.Context) error {
	for {
		frame, err := h.recv()
		if err != nil {
			return err
		}
		if err := h.dispatch(ctx, frame); err != nil {
			return err
		}
	}
}

func (h *handler) dispatch(ctx context.Context, frame *nodev1.ConnectRequest) error {
	work := h.server.deps.Work
	switch f := frame.GetFrame().(type) {
	case *nodev1.ConnectRequest_Heartbeat:
		h.heartbeat(f.Heartbeat)
	case *nodev1.ConnectRequest_TaskDelivered:
		return work.Delivered(ctx, h.sess, f.TaskDelivered)
	case *nodev1.ConnectRequest_TaskStarted:
		return work.Started(ctx, h.sess, f.TaskStarted)
	case *nodev1.ConnectRequest_TaskProgress:
		return work.Progress(ctx, h.sess, f.TaskProgress)
	case *nodev1.ConnectRequest_TaskResult:
		return work.Result(ctx, h.sess, f.TaskResult)
	case *nodev1.ConnectRequest_Observation:
		h.observed(f.Observation, wallclock.Now())
	case *nodev1.ConnectRequest_OutputChunk:
		h.server.deps.Output(h.sess, f.OutputChunk)
	case *nodev1.ConnectRequest_Diagnostic:
		h.diagnose(h.diags.take(f.Diagnostic.GetDiagnostics(), wallclock.Now()))
	case *nodev1.ConnectRequest_RenewRequest:
		h.renewal(ctx, f.RenewRequest)
	case *nodev1.ConnectRequest_TaskKeysHeld:
		if h.keys.record(f.TaskKeysHeld.GetKeyIds()) {
			h.server.reportKeys(ctx, h.sess, h.keys)
		}
	case *nodev1.ConnectRequest_CertificateStored:
		// The next certificate counts when a session is ready on it; an acknowledgement changes nothing.
	case *nodev1.ConnectRequest_ProfileAnswer:
		h.profileAnswered(f.ProfileAnswer)
	case *nodev1.ConnectRequest_Goodbye:
		h.sess.Depart(f.Goodbye.GetReason())
		return errHungUp
	case *nodev1.ConnectRequest_Ready:
		// The Ready of an admitted agent was counted when the session opened.
	default:
		return fault.New(commonv1.Reason_REASON_PROTOCOL_VIOLATION, "an admitted session does not send this frame")
	}
	return nil
}

func (h *handler) heartbeat(f *nodev1.Heartbeat) {
	h.server.deps.Metrics.Frame("heartbeat")
	now := wallclock.Now()
	h.clocked(f, now)
	// An agent reports a change once, so the change is taken whether or not this heartbeat is answered.
	if h.sess.State() == commonv1.SessionState_SESSION_STATE_ADMITTED {
		if changed := h.host.take(f.GetChangedFacts(), now); changed != nil {
			h.server.deps.Host(h.sess, changed)
		}
		h.diagnose(h.diags.take(nil, now))
	}
	if h.pace.heartbeat(now, h.server.lim.HeartbeatsPerSec) {
		h.sess.SendInline(h.server.heartbeatAck(h.sess, f.GetSequence()))
	}
}

// renewal requests the next certificate from recovery. A session has at most one renewal under way.
func (h *handler) renewal(ctx context.Context, f *nodev1.RenewRequest) {
	answer := func(issued *nodev1.CertificateIssued) {
		issued.RequestId = f.GetRequestId()
		h.sess.Send(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_CertificateIssued{CertificateIssued: issued}})
	}
	if !h.renewing.CompareAndSwap(false, true) {
		answer(&nodev1.CertificateIssued{Denied: fault.ToDenial(fault.New(commonv1.Reason_REASON_ENROLLMENT_IN_FLIGHT,
			"a renewal is under way", fault.RetryAfter(time.Second)), "")})
		return
	}
	s, sess, instance := h.server, h.sess, h.sess.InstanceID()
	s.deps.Roster.Go(func() {
		over := sync.OnceFunc(func() { h.renewing.Store(false) })
		defer over()
		ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
		defer cancel()
		res, err := s.deps.Authority.RenewCertificate(ctx, &recoveryv1.RenewCertificateRequest{
			NodeId: sess.Identity.NodeID, NodeInstanceId: instance, SessionId: sess.ID, Serial: sess.Identity.Serial,
			Csr: f.GetCsr(), RecoveryPublicKey: f.GetRecoveryPublicKey(),
		})
		over() // the agent may request another as soon as it has the answer
		if err != nil {
			s.deps.Logger.WarnContext(ctx, "certificate not renewed", slog.String("node_id", sess.Identity.NodeID),
				slog.Any("error", err))
			answer(&nodev1.CertificateIssued{Denied: fault.ToDenial(err, "")})
			return
		}
		if failpoint.Hit("nodeapi.renew.before_send") != nil {
			return
		}
		answer(&nodev1.CertificateIssued{
			CertificateChainPem: res.GetCertificateChainPem(),
			RecoveryToken:       res.GetRecoveryToken(),
		})
	})
}

// policyChanged reports whether an agent that was sent one policy has to be sent another. An interval that has grown
// with the number of nodes is none: beats that come more often than asked for do no harm, and while a fleet connects,
// the interval grows with each session.
func policyChanged(sent, now *commonv1.NodePolicy) bool {
	if now.GetHeartbeatInterval().AsDuration() < sent.GetHeartbeatInterval().AsDuration() {
		return true
	}
	same := proto.CloneOf(now)
	same.HeartbeatInterval = sent.GetHeartbeatInterval()
	return !proto.Equal(sent, same)
}

// PolicyFrame returns the frame that sends agents a changed policy.
func PolicyFrame(p *commonv1.NodePolicy) *nodev1.ConnectResponse {
	return &nodev1.ConnectResponse{
		Frame: &nodev1.ConnectResponse_PolicyUpdate{PolicyUpdate: &nodev1.PolicyUpdate{Policy: p}},
	}
}

// HeartbeatInterval returns the interval for a fleet of nodes: 15 s for a few nodes, 60 s from ten thousand on.
func HeartbeatInterval(nodes int) time.Duration {
	return min(15*time.Second+time.Duration(nodes)*4500*time.Microsecond, time.Minute)
}
