package session

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc"
	grpcbackoff "google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	"github.com/gpuaas/mesh/agent/session/transport"
	"github.com/gpuaas/mesh/internal/pki"
)

const (
	keepaliveTimeout = 10 * time.Second
	maxHeaders       = 16 << 10
)

// Window is how many bytes nodeapi may send ahead on a connection.
const Window = 256 << 10

// dial makes a connection for one session alone: a replacement never shares one with the session that it replaces.
func (c *Client) dial(
	cert *tls.Certificate, trustDomain, endpoint string, phases *transport.Phases,
) (*grpc.ClientConn, *transport.Wire, error) {
	store, err := pki.StoreOf(cert)
	if err != nil {
		return nil, nil, err
	}
	tlsConfig, err := pki.ClientTLS(pki.ClientConfig{
		Store: store, Roots: c.deps.Roots, Server: pki.ServiceID(trustDomain, "nodeapi"), Time: c.deps.Clock.Now,
	})
	if err != nil {
		return nil, nil, err
	}
	w := &transport.Wire{}
	cc, err := grpc.NewClient("passthrough:///"+endpoint,
		grpc.WithTransportCredentials(transport.Watch(credentials.NewTLS(tlsConfig), w, phases)),
		grpc.WithContextDialer(func(ctx context.Context, endpoint string) (net.Conn, error) {
			conn, address, err := c.route.Connect(ctx, endpoint, phases.Limit(transport.PhaseConnect))
			if err != nil {
				w.Note(err)
				return nil, err
			}
			phases.Connected(address)
			return conn, nil
		}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: c.cfg.KeepaliveTime, Timeout: keepaliveTimeout,
			PermitWithoutStream: true,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(c.cfg.MaxFrame)),
		grpc.WithMaxHeaderListSize(maxHeaders),
		grpc.WithReadBufferSize(c.cfg.ReadBuffer), grpc.WithWriteBufferSize(c.cfg.WriteBuffer),
		// The windows are fixed, as nodeapi's are: grpc would send a ping after each frame to measure the bandwidth, which a
		// session of short frames pays with a write and a read at both ends and never uses.
		grpc.WithInitialWindowSize(Window), grpc.WithInitialConnWindowSize(Window),
		grpc.WithDisableRetry(), grpc.WithDisableServiceConfig(), grpc.WithIdleTimeout(0),
		// This package reconnects itself, on a new connection: grpc must not reconnect as well.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           grpcbackoff.Config{BaseDelay: time.Hour, MaxDelay: time.Hour},
			MinConnectTimeout: c.cfg.OpenTimeout,
		}),
	)
	if err != nil {
		return nil, nil, fmt.Errorf("prepare connection: %w", err)
	}
	return cc, w, nil
}

// limit returns how long a phase may take in an open after so many that timed out. It doubles with every round: if
// every address is slow, the cause is not one paused replica but load.
func (c *Client) limit(ph transport.Phase, timeouts int) time.Duration {
	limit := map[transport.Phase]time.Duration{
		transport.PhaseConnect: c.cfg.ConnectTimeout, transport.PhaseHandshake: c.cfg.HandshakeTimeout,
		transport.PhaseWelcome: c.cfg.WelcomeTimeout, transport.PhaseAdmission: c.cfg.AdmissionTimeout,
	}[ph]
	for range timeouts / c.route.Round() {
		if limit >= c.cfg.OpenTimeout {
			break
		}
		limit *= 2
	}
	return min(limit, c.cfg.OpenTimeout)
}
