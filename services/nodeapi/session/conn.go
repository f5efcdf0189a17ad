package session

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/services/nodeapi/session/admission"
)

// errNoPeer is returned for a call without the connection's identity, which is a fault of the server's own wiring.
var errNoPeer = errors.New("call without a verified peer")

// errProtocol is returned if a client did not negotiate HTTP/2.
var errProtocol = errors.New("the client did not agree on HTTP/2")

// transport is the server side of the agents' port. Unlike grpc's own TLS credentials it keeps the raw connection,
// since closing it is the only way to end the stream of a peer that does not hang up; and it reports each refused
// handshake with its reason.
type transport struct {
	tls         *tls.Config
	trustDomain string
	timeout     time.Duration
	now         func() time.Time
	onReject    func(pki.Reject)
	onShed      func()
	admission   *admission.Admission
}

// authInfo is the information about its connection that a call has. It lives as long as the connection, so it has no
// more of the peer than calls need.
type authInfo struct {
	credentials.CommonAuthInfo

	id      pki.ID
	serial  string
	leaf    *x509.Certificate
	conn    *admission.Conn
	streams pace // of the streams that it opens
}

// AuthType names the kind of authentication.
func (*authInfo) AuthType() string { return "tls" }

// ServerHandshake authenticates a connection.
func (t *transport) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	//nolint:forbidigo // grpc gives this call no context
	ctx, cancel := context.WithTimeout(context.Background(), t.timeout)
	defer cancel()
	pending := t.admission.Handshaking(ctx, raw, sourceOf(raw.RemoteAddr().String()))
	conn := tls.Server(pending, t.tls)
	err := conn.HandshakeContext(ctx)
	pending.End()
	if errors.Is(err, admission.ErrShed) {
		t.onShed()
		return nil, nil, errors.Join(err, pending.Close())
	}
	if err != nil {
		t.reject(raw, err)
		return nil, nil, errors.Join(fmt.Errorf("handshake: %w", err), pending.Close())
	}
	state := conn.ConnectionState()
	p, err := pki.PeerFromState(&state, t.trustDomain)
	if err != nil {
		t.reject(raw, err)
		return nil, nil, errors.Join(err, conn.Close())
	}
	if state.NegotiatedProtocol != "h2" {
		t.reject(raw, errProtocol)
		return nil, nil, errors.Join(errProtocol, conn.Close())
	}
	return conn, &authInfo{
		CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity},
		id:             p.ID, serial: p.Serial, leaf: p.Leaf, conn: pending,
	}, nil
}

func (t *transport) reject(raw net.Conn, err error) {
	r := pki.ClassifyHandshake(err, t.now())
	r.Remote = raw.RemoteAddr().String()
	t.onReject(r)
}

// ClientHandshake returns an error: these credentials are for a server.
func (t *transport) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("agents' port does not dial")
}

// Info describes the protocol.
func (t *transport) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tls", SecurityVersion: "1.3"}
}

// Clone copies the credentials.
func (t *transport) Clone() credentials.TransportCredentials {
	c := *t
	return &c
}

// OverrideServerName does nothing: agents verify an identity, not a host name.
func (t *transport) OverrideServerName(string) error { return nil }

func connOf(ctx context.Context) (*authInfo, error) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil, errNoPeer
	}
	info, ok := p.AuthInfo.(*authInfo)
	if !ok {
		return nil, errNoPeer
	}
	return info, nil
}

// shedder closes connections above a limit at once, before the TLS handshake.
type shedder struct {
	net.Listener

	limit  int64
	open   atomic.Int64
	onShed func()
}

// Accept returns the next connection that is within the limit.
func (l *shedder) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if l.open.Add(1) > l.limit {
			l.open.Add(-1)
			l.onShed()
			_ = c.Close()
			continue
		}
		return &counted{Conn: c, from: l}, nil
	}
}

type counted struct {
	net.Conn

	from   *shedder
	closed atomic.Bool
}

// SyscallConn returns the connection of the kernel.
func (c *counted) SyscallConn() (syscall.RawConn, error) {
	of, ok := c.Conn.(syscall.Conn)
	if !ok {
		return nil, errors.ErrUnsupported
	}
	return of.SyscallConn()
}

// Close closes the connection and frees its place.
func (c *counted) Close() error {
	if c.closed.CompareAndSwap(false, true) {
		c.from.open.Add(-1)
	}
	return c.Conn.Close()
}
