package calls

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"time"

	"connectrpc.com/connect"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/rpc/assertion"
)

// HTTPConfig tunes the connections of a client.
type HTTPConfig struct {
	DialTimeout time.Duration // default 5 s
	// Dial replaces the dialer, for drills and for addresses that are not in DNS.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
}

// A replica that is stopped, or whose host is gone, ends no connection, and all calls of a process go over one: until
// that is given up they fail, though other replicas answer. A connection that brings nothing for silentFor is tried by
// a ping, and ends if that is not answered within pingWithin.
const (
	silentFor  = 5 * time.Second
	pingWithin = 5 * time.Second
)

// HTTPClient returns the HTTP/2 client for one service: it refuses every server but cfg.Server, and detects a dead one
// within silentFor and pingWithin, 10 s. It follows no redirect and no proxy of the environment, and has no time limit
// of its own: calls carry deadlines, streams end by ping. Close it with CloseIdleConnections.
func HTTPClient(cfg pki.ClientConfig, opts HTTPConfig) (*http.Client, error) {
	tlsConfig, err := pki.ClientTLS(cfg)
	if err != nil {
		return nil, err
	}
	if opts.Dial == nil {
		timeout := cmp.Or(opts.DialTimeout, 5*time.Second)
		opts.Dial = (&net.Dialer{Timeout: timeout, KeepAlive: 15 * time.Second}).DialContext
	}
	protocols := new(http.Protocols)
	protocols.SetHTTP2(true)
	return &http.Client{
		Transport: envelopeTransport{&http.Transport{
			DialContext:           opts.Dial,
			TLSClientConfig:       tlsConfig,
			TLSHandshakeTimeout:   5 * time.Second,
			IdleConnTimeout:       90 * time.Second,
			MaxIdleConnsPerHost:   4,
			Protocols:             protocols,
			DisableCompression:    true,
			ExpectContinueTimeout: time.Second,
			HTTP2:                 &http.HTTP2Config{SendPingTimeout: silentFor, PingTimeout: pingWithin},
		}},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}, nil
}

// Config describes how calls are made.
type Config struct {
	// Peer is the service that is called; a refusal that says that it could not be reached names it. Empty: no name.
	Peer string
	// Timeout of a unary call whose context has no deadline; default 10 s. Streams have none.
	Timeout time.Duration
	// MaxReadBytes of one answer; default 4 MiB.
	MaxReadBytes int
	// MaxSendBytes of one request; default 1 MiB, as servers take by default.
	MaxSendBytes int
	// Asserter signs the person of calls; only readmodel has one.
	Asserter *assertion.Signer
}

// Options returns what goes into every generated client: correlation, deadline, assertion, and errors rebuilt as
// faults. A unary call that is declared idempotent is tried twice more if the server could not be reached.
func Options(cfg Config) []connect.ClientOption {
	interceptors := []connect.Interceptor{&caller{peer: cfg.Peer, timeout: cmp.Or(cfg.Timeout, 10*time.Second)}}
	if cfg.Asserter != nil {
		interceptors = append(interceptors, cfg.Asserter)
	}
	return []connect.ClientOption{
		connect.WithReadMaxBytes(cmp.Or(cfg.MaxReadBytes, 4<<20)),
		connect.WithSendMaxBytes(cmp.Or(cfg.MaxSendBytes, 1<<20)),
		connect.WithInterceptors(interceptors...),
	}
}

// caller is the outermost client interceptor.
type caller struct {
	peer    string
	timeout time.Duration
}

const retries = 2

// WrapUnary implements connect.Interceptor.
func (c *caller) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		if _, ok := ctx.Deadline(); !ok {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, c.timeout)
			defer cancel()
		}
		rpc.WriteCorrelation(ctx, req.Header())
		resp, err := next(ctx, req)
		for attempt := 1; attempt <= retries && retryable(req.Spec(), err); attempt++ {
			select {
			case <-ctx.Done():
				return nil, callFault(c.peer, err)
			case <-time.After(time.Duration(attempt*attempt) * 50 * time.Millisecond):
			}
			resp, err = next(ctx, req)
		}
		if err != nil {
			return nil, callFault(c.peer, err)
		}
		return resp, nil
	}
}

// retryable reports whether the same call may be made again: the server was not reached (an error that came over the
// wire is an answer), and making the call twice does no harm.
func retryable(spec connect.Spec, err error) bool {
	if err == nil || spec.IdempotencyLevel == connect.IdempotencyUnknown {
		return false
	}
	var failed *connect.Error
	return errors.As(err, &failed) && failed.Code() == connect.CodeUnavailable && !connect.IsWireError(err)
}

// WrapStreamingClient implements connect.Interceptor.
func (c *caller) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		conn := next(ctx, spec)
		rpc.WriteCorrelation(ctx, conn.RequestHeader())
		return faultConn{StreamingClientConn: conn, peer: c.peer}
	}
}

// WrapStreamingHandler implements connect.Interceptor; this one is for clients.
func (c *caller) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

// faultConn rebuilds the faults of a stream. Its end (io.EOF) is returned unchanged.
type faultConn struct {
	connect.StreamingClientConn

	peer string
}

func (c faultConn) Receive(message any) error {
	return c.fault(c.StreamingClientConn.Receive(message))
}
func (c faultConn) Send(message any) error { return c.fault(c.StreamingClientConn.Send(message)) }
func (c faultConn) CloseRequest() error    { return c.fault(c.StreamingClientConn.CloseRequest()) }
func (c faultConn) CloseResponse() error   { return c.fault(c.StreamingClientConn.CloseResponse()) }

func (c faultConn) fault(err error) error {
	if err == nil || endOfStream(err) {
		return err
	}
	return callFault(c.peer, err)
}

// callFault rebuilds the fault of a peer's refusal. A message over our own limit is a mistake of this process, which a
// later attempt would repeat. If no answer of the peer came, the fault names the peer: which of the services is missing
// is known here alone.
func callFault(peer string, err error) error {
	var failed *connect.Error
	if _, ours := fault.As(err); ours || !errors.As(err, &failed) || connect.IsWireError(err) {
		return fault.FromConnect(err)
	}
	switch code := failed.Code(); {
	case code == connect.CodeResourceExhausted:
		return fault.New(commonv1.Reason_REASON_FRAME_TOO_LARGE, "", fault.Cause(err))
	case code == connect.CodeUnavailable && peer != "":
		return fault.New(commonv1.Reason_REASON_UNAVAILABLE, peer+", which this needs, cannot be reached now",
			fault.Cause(err), fault.WithAction(commonv1.Action_ACTION_WAIT))
	case code == connect.CodeDeadlineExceeded && peer != "":
		return fault.New(commonv1.Reason_REASON_DEADLINE_EXCEEDED,
			"no answer of "+peer+" came in time; the request may or may not have taken effect", fault.Cause(err),
			fault.WithAction(commonv1.Action_ACTION_WAIT))
	default:
		return fault.FromConnect(err)
	}
}

// endOfStream reports whether an error of a stream is its ordinary end.
func endOfStream(err error) bool { return errors.Is(err, io.EOF) }
