package guard

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/rpc"
)

// GRPCPeer returns the verified certificate of the caller of grpc-go. Errors wrap pki.ErrIdentity.
func GRPCPeer(ctx context.Context, trustDomain string) (pki.Peer, error) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return pki.Peer{}, fmt.Errorf("%w: no peer", pki.ErrIdentity)
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok {
		return pki.Peer{}, fmt.Errorf("%w: no TLS", pki.ErrIdentity)
	}
	return pki.PeerFromState(&info.State, trustDomain)
}

// GRPCCredentials returns server credentials that report refused handshakes to onReject, with the claimed name marked
// as unverified. cfg comes from pki.ServerTLS with NextProtos h2.
func GRPCCredentials(cfg *tls.Config, onReject func(pki.Reject)) credentials.TransportCredentials {
	return &watchingCredentials{TransportCredentials: credentials.NewTLS(cfg), cfg: cfg, onReject: onReject}
}

type watchingCredentials struct {
	credentials.TransportCredentials

	cfg      *tls.Config
	onReject func(pki.Reject)
}

// ServerHandshake implements credentials.TransportCredentials.
func (c *watchingCredentials) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	secured, info, err := c.TransportCredentials.ServerHandshake(conn)
	if err != nil && c.onReject != nil {
		now := time.Now()
		if c.cfg.Time != nil {
			now = c.cfg.Time()
		}
		rejected := pki.ClassifyHandshake(err, now)
		rejected.Remote = conn.RemoteAddr().String()
		c.onReject(rejected)
	}
	return secured, info, err
}

// Clone implements credentials.TransportCredentials.
func (c *watchingCredentials) Clone() credentials.TransportCredentials {
	return &watchingCredentials{TransportCredentials: c.TransportCredentials.Clone(), cfg: c.cfg, onReject: c.onReject}
}

// GRPC checks calls before the methods of a grpc-go server as Guard does for those of Connect, without persons.
type GRPC struct {
	TrustDomain string
	Policies    rpc.PolicySet
	Logger      *slog.Logger
}

// Stream is the interceptor for streams.
func (g GRPC) Stream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo,
	handler grpc.StreamHandler,
) error {
	ctx := g.correlate(stream.Context())
	err := g.guarded(ctx, info.FullMethod, func(ctx context.Context) error {
		return handler(srv, &contextStream{ServerStream: stream, ctx: ctx})
	})
	return g.finish(ctx, info.FullMethod, err)
}

// Unary is the interceptor for single requests.
func (g GRPC) Unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any,
	error,
) {
	ctx = g.correlate(ctx)
	var resp any
	err := g.guarded(ctx, info.FullMethod, func(ctx context.Context) error {
		var err error
		resp, err = handler(ctx, req)
		return err
	})
	if err != nil {
		return nil, g.finish(ctx, info.FullMethod, err)
	}
	return resp, nil
}

//nolint:nonamedreturns // the result of a recovered panic has no other way out.
func (g GRPC) guarded(ctx context.Context, procedure string, call func(context.Context) error) (err error) {
	defer func() { recovered(recover(), &err) }()
	policy, ok := g.Policies[procedure]
	if !ok {
		return fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "", fault.Cause(errors.New("the method has no policy")))
	}
	who, err := GRPCPeer(ctx, g.TrustDomain)
	if err != nil {
		return fault.New(commonv1.Reason_REASON_UNAUTHENTICATED, "", fault.Cause(err))
	}
	if !time.Now().Before(who.NotAfter) {
		return fault.New(commonv1.Reason_REASON_CERTIFICATE_EXPIRED, "")
	}
	ctx = rpc.WithPeer(ctx, who)
	if !policy.Allows(rpc.CallerOf(ctx)) {
		return fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "",
			fault.Cause(fmt.Errorf("%s may not call this method", who.ID)))
	}
	if who.ID.Kind == pki.KindNode {
		ctx = obs.With(ctx, obs.Correlation{NodeID: who.ID.Name})
	}
	return call(ctx)
}

func (g GRPC) correlate(ctx context.Context) context.Context {
	header := map[string][]string{}
	if md, ok := metadata.FromIncomingContext(ctx); ok {
		for _, value := range md.Get(rpc.HeaderCorrelationID) {
			header[rpc.HeaderCorrelationID] = []string{value}
		}
	}
	return rpc.ReadCorrelation(ctx, header, false)
}

func (g GRPC) finish(ctx context.Context, procedure string, err error) error {
	if err == nil {
		return nil
	}
	logRefusal(ctx, g.Logger, err, slog.String("procedure", procedure))
	return fault.ToGRPC(err, obs.From(ctx).CorrelationID)
}

type contextStream struct {
	grpc.ServerStream

	ctx context.Context //nolint:containedctx // of the stream that this value is.
}

// Context implements grpc.ServerStream.
func (s *contextStream) Context() context.Context { return s.ctx }
