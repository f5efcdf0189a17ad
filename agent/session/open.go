package session

import (
	"cmp"
	"context"
	"crypto"
	"crypto/tls"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/mesh/agent/session/transport"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/joinstate"
)

// open dials and brings a session to Admitted. replaces is the nonce of the session it takes the place of, timeouts the
// number of opens before it that timed out. Frames that come after ctx's end, or after a timeout, are ignored.
func (c *Client) open(ctx context.Context, replaces string, timeouts int) (*conn, error) {
	node, ok := c.deps.Identity.Node()
	cert := c.deps.Identity.Certificate()
	if !ok || cert == nil {
		return nil, errNoIdentity
	}
	address, err := c.deps.Endpoint()
	if err != nil {
		return nil, fmt.Errorf("find the node API: %w", err)
	}
	// The stream outlives ctx: an orderly end still sends Goodbye on it.
	life, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	timed := &transport.Phases{
		Limit:  func(ph transport.Phase) time.Duration { return c.limit(ph, timeouts) },
		Expire: cancel,
	}
	cc, w, err := c.dial(cert, node.TrustDomain, address, timed)
	if err != nil {
		cancel(err)
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
	timeout := time.AfterFunc(c.cfg.OpenTimeout, func() { cancel(errOpenTimeout) })
	k := &conn{
		client: c, cc: cc, wire: w, opening: timed, ctx: life, cancel: cancel, cert: cert,
		retired: make(chan struct{}), leaving: make(chan struct{}), ended: make(chan struct{}),
		sooner: make(chan struct{}, 1),
	}
	k.interval.Store(int64(c.cfg.Heartbeat))
	err = k.shake(node.NodeID, node.InstanceID, replaces)
	late := timed.End()
	timedOut, ended := !timeout.Stop(), !stop()
	if late != nil || timedOut || ended || err != nil {
		switch {
		case ended:
			err = context.Cause(ctx)
		case late != nil:
			err = late
		case timedOut:
			err = errOpenTimeout
		}
		cancel(context.Canceled)
		return nil, errors.Join(err, cc.Close())
	}
	k.openedAt, k.opening = time.Now(), nil
	return k, nil
}

// shake takes the stream from Hello to Admitted.
func (k *conn) shake(nodeID, instanceID, replaces string) error {
	c := k.client
	var err error
	if k.stream, err = nodev1.NewNodeServiceClient(k.cc).Connect(k.ctx); err != nil {
		return transport.Understand(err, k.wire)
	}
	joined, _ := c.deps.Identity.JoinState()
	hello := &nodev1.Hello{
		NodeId: nodeID, NodeInstanceId: instanceID, JoinState: joined, ReplacesNonce: replaces,
		ProtocolVersion: ProtocolVersion,
		LedgerId:        c.ledger,
	}
	if hook := c.deps.Hooks.Hello; hook != nil {
		hook(hello)
	}
	sent := time.Now()
	if err := k.first(&nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_Hello{Hello: hello}}); err != nil {
		return err
	}
	welcomed := false
	for {
		frame, err := k.stream.Recv()
		if err != nil {
			return transport.Understand(err, k.wire)
		}
		if k.ctx.Err() != nil {
			return context.Cause(k.ctx) // the open was given up while the frame was on its way
		}
		k.opening.Heard()
		switch f := frame.GetFrame().(type) {
		case *nodev1.ConnectResponse_Welcome:
			if welcomed {
				return fmt.Errorf("%w: a second Welcome", errProtocol)
			}
			welcomed = true
			k.opening.Pause()
			if err := k.welcome(f.Welcome, sent); err != nil {
				return err
			}
			k.opening.Enter(transport.PhaseAdmission)
			sent = time.Now()
		case *nodev1.ConnectResponse_Admitted:
			if !welcomed || f.Admitted.GetGeneration() != k.generation {
				return fmt.Errorf("%w: admitted to generation %d, not %d", errProtocol, f.Admitted.GetGeneration(), k.generation)
			}
			c.observe(f.Admitted.GetServerTime(), sent)
			k.lists = f.Admitted.GetRunListFollows()
			return nil
		case *nodev1.ConnectResponse_Challenge:
			answer, err := answerChallenge(k.cert, nodeID, f.Challenge)
			if err != nil {
				return err
			}
			if err := k.first(answer); err != nil {
				return err
			}
		case *nodev1.ConnectResponse_Denied:
			return fault.FromDenial(f.Denied)
		case *nodev1.ConnectResponse_Reconnect:
			return fault.New(f.Reconnect.GetReason(), "", fault.WithAction(commonv1.Action_ACTION_WAIT))
		case *nodev1.ConnectResponse_PolicyUpdate:
			k.applyPolicy(f.PolicyUpdate.GetPolicy())
		default:
			// Other frames have no meaning before Admitted.
		}
	}
}

// welcome makes the join state and the task keys durable and sends Ready.
func (k *conn) welcome(w *nodev1.Welcome, sent time.Time) error {
	c := k.client
	c.observe(w.GetServerTime(), sent)
	stored, err := c.deps.Identity.StoreJoinState(w.GetGeneration(), w.GetJoinState())
	if err != nil {
		return &storageError{err}
	}
	if !stored {
		// This is a reply to an earlier open, or the control plane lost later generations: a session of this generation would
		// not be valid.
		return fmt.Errorf("%w: welcomed to generation %d, which is not larger than the one held", errProtocol,
			w.GetGeneration())
	}
	k.generation, k.nonce, k.sessionID = w.GetGeneration(), w.GetNonce(), w.GetSessionId()
	k.applyPolicy(w.GetPolicy())
	c.takeRoots(k.ctx, w.GetServiceRoots())
	held := c.takeKeys(k.ctx, w.GetTaskKeys())
	if err := failpoint.Hit("agent.session.welcome.before_send"); err != nil {
		return err
	}
	if off, known := c.deps.Clock.Skew(); known && off.Abs() > skewed {
		if err := k.first(k.reading()); err != nil {
			return err
		}
	}
	return k.first(
		&nodev1.ConnectRequest{
			Frame: &nodev1.ConnectRequest_Ready{Ready: &nodev1.Ready{Generation: k.generation, TaskKeyIds: held}},
		},
	)
}

// skewed is the difference between the host's clock and the server's from which the agent sends its clock before it is
// admitted, so that the control plane knows of it from the beginning of the session. It is half of what the control
// plane takes for wrong.
const skewed = 30 * time.Second

// reading returns a heartbeat with nothing but the host's clocks.
func (k *conn) reading() *nodev1.ConnectRequest {
	return &nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_Heartbeat{Heartbeat: &nodev1.Heartbeat{
		Monotonic: durationpb.New(k.client.deps.Clock.Elapsed()), WallClock: timestamppb.New(k.client.deps.Clock.Wall()),
	}}}
}

// first sends a frame while there is no writer yet. If the stream is over, Recv returns the cause.
func (k *conn) first(frame *nodev1.ConnectRequest) error {
	err := k.stream.Send(frame)
	if err == nil {
		return nil
	}
	_, recvErr := k.stream.Recv()
	return transport.Understand(cmp.Or(recvErr, err), k.wire)
}

// answerChallenge signs a challenge with the key of the session's own certificate, which proves that this process lives
// and has that key.
func answerChallenge(cert *tls.Certificate, nodeID string, challenge *nodev1.Challenge) (*nodev1.ConnectRequest,
	error,
) {
	const least, most = 16, 64
	if n := len(challenge.GetNonce()); n < least || n > most {
		return nil, fmt.Errorf("%w: a challenge of %d bytes", errProtocol, n)
	}
	key, ok := cert.PrivateKey.(crypto.Signer)
	if !ok {
		return nil, errors.New("answer challenge: the key cannot sign")
	}
	signature, err := joinstate.SignChallenge(key, challenge.GetNonce(), nodeID)
	if err != nil {
		return nil, err
	}
	return &nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_ChallengeAnswer{
		ChallengeAnswer: &nodev1.ChallengeAnswer{Nonce: challenge.GetNonce(), Signature: signature},
	}}, nil
}

// storageError means that the join state could not be stored on disk.
type storageError struct{ cause error }

func (e *storageError) Error() string { return "store join state: " + e.cause.Error() }
func (e *storageError) Unwrap() error { return e.cause }

// DiagnosticCode returns the code under which the error is recorded.
func (*storageError) DiagnosticCode() commonv1.DiagnosticCode {
	return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_STATE_DIRECTORY_FAILED
}
