package session

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
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

// wire keeps the failures below grpc, which reports them only as text.
type wire struct {
	mu  sync.Mutex
	err error
}

func (w *wire) note(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err == nil && err != nil {
		w.err = err
	}
}

func (w *wire) first() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

// watched notes the first failed read: in TLS 1.3 a read after the client's handshake returns the server's refusal of
// the client's certificate.
type watched struct {
	net.Conn
	wire *wire
}

func (c watched) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	var netErr *net.OpError
	if errors.As(err, &netErr) && netErr.Op == "remote error" {
		c.wire.note(err)
	}
	return n, err
}

// watchedTLS is TLS that keeps its failures in wire.
type watchedTLS struct {
	credentials.TransportCredentials
	wire   *wire
	phases *phases
}

func (c watchedTLS) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn,
	credentials.AuthInfo, error,
) {
	conn, info, err := c.TransportCredentials.ClientHandshake(ctx, authority, raw)
	if err != nil {
		c.wire.note(&handshakeError{err})
		return nil, nil, err
	}
	c.phases.enter(phaseWelcome)
	return watched{conn, c.wire}, info, nil
}

func (c watchedTLS) Clone() credentials.TransportCredentials {
	return watchedTLS{c.TransportCredentials.Clone(), c.wire, c.phases}
}

// handshakeError is a failed TLS handshake.
type handshakeError struct{ cause error }

func (e *handshakeError) Error() string { return "TLS handshake: " + e.cause.Error() }
func (e *handshakeError) Unwrap() error { return e.cause }

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
		grpc.WithTransportCredentials(watchedTLS{credentials.NewTLS(tlsConfig), w, phases}),
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
