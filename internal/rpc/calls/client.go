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

// HTTPClient returns the HTTP/2 client for one service: it refuses every server but cfg.Server, and detects a dead one
// within 25 s. It follows no redirect and no proxy of the environment, and has no time limit of its own: calls carry
// deadlines, streams end by ping. Close it with CloseIdleConnections.
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
			HTTP2:                 &http.HTTP2Config{SendPingTimeout: 15 * time.Second, PingTimeout: 10 * time.Second},
		}},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}, nil
}

// Config describes how calls are made.
type Config struct {
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
	interceptors := []connect.Interceptor{&caller{timeout: cmp.Or(cfg.Timeout, 10*time.Second)}}
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
				return nil, callFault(err)
			case <-time.After(time.Duration(attempt*attempt) * 50 * time.Millisecond):
			}
			resp, err = next(ctx, req)
		}
		if err != nil {
			return nil, callFault(err)
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
		return faultConn{StreamingClientConn: conn}
	}
}

// WrapStreamingHandler implements connect.Interceptor; this one is for clients.
func (c *caller) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

// faultConn rebuilds the faults of a stream. Its end (io.EOF) is returned unchanged.
type faultConn struct {
	connect.StreamingClientConn
}

func (c faultConn) Receive(message any) error {
	return streamFault(c.StreamingClientConn.Receive(message))
}
func (c faultConn) Send(message any) error { return streamFault(c.StreamingClientConn.Send(message)) }
func (c faultConn) CloseRequest() error    { return streamFault(c.StreamingClientConn.CloseRequest()) }
func (c faultConn) CloseResponse() error   { return streamFault(c.StreamingClientConn.CloseResponse()) }

func streamFault(err error) error {
	if err == nil || endOfStream(err) {
		return err
	}
	return callFault(err)
}

// callFault rebuilds the fault of a peer's refusal. A message over our own limit is a mistake of this process, which a
// later attempt would repeat.
func callFault(err error) error {
	var failed *connect.Error
	if errors.As(err, &failed) && failed.Code() == connect.CodeResourceExhausted && !connect.IsWireError(err) {
		return fault.New(commonv1.Reason_REASON_FRAME_TOO_LARGE, "", fault.Cause(err))
	}
	return fault.FromConnect(err)
}

// endOfStream reports whether an error of a stream is its ordinary end.
func endOfStream(err error) bool { return errors.Is(err, io.EOF) }
