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

	"github.com/gpuaas/mesh/internal/pki"
)

const (
	keepaliveTimeout = 10 * time.Second
	maxHeaders       = 16 << 10
)

// dial makes a connection for one session alone: a replacement never shares one with the session that it replaces.
func (c *Client) dial(
	cert *tls.Certificate, trustDomain, endpoint string, phases *phases,
) (*grpc.ClientConn, *wire, error) {
	store, err := pki.NewStore(cert.PrivateKey, cert.Certificate)
	if err != nil {
		return nil, nil, err
	}
	tlsConfig, err := pki.ClientTLS(pki.ClientConfig{
		Store: store, Roots: c.deps.Roots, Server: pki.ServiceID(trustDomain, "nodeapi"), Time: c.deps.Clock.Now,
	})
	if err != nil {
		return nil, nil, err
	}
	w := &wire{}
	cc, err := grpc.NewClient("passthrough:///"+endpoint,
		grpc.WithTransportCredentials(watch(credentials.NewTLS(tlsConfig), w, phases)),
		grpc.WithContextDialer(func(ctx context.Context, endpoint string) (net.Conn, error) {
			conn, address, err := c.route.connect(ctx, endpoint, phases.limit(phaseConnect))
			if err != nil {
				w.note(err)
				return nil, err
			}
			phases.connected(address)
			return conn, nil
		}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: c.cfg.KeepaliveTime, Timeout: keepaliveTimeout,
			PermitWithoutStream: true,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(c.cfg.MaxFrame)),
		grpc.WithMaxHeaderListSize(maxHeaders),
		grpc.WithReadBufferSize(c.cfg.ReadBuffer), grpc.WithWriteBufferSize(c.cfg.WriteBuffer),
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
func (c *Client) limit(ph phase, timeouts int) time.Duration {
	limit := map[phase]time.Duration{
		phaseConnect: c.cfg.ConnectTimeout, phaseHandshake: c.cfg.HandshakeTimeout,
		phaseWelcome: c.cfg.WelcomeTimeout, phaseAdmission: c.cfg.AdmissionTimeout,
	}[ph]
	for range timeouts / c.route.round() {
		if limit >= c.cfg.OpenTimeout {
			break
		}
		limit *= 2
	}
	return min(limit, c.cfg.OpenTimeout)
}
