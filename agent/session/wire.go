package session

import (
	"context"
	"errors"
	"net"
	"sync"

	"google.golang.org/grpc/credentials"
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

// watch returns TLS that keeps its failures in w, and begins the phase of Welcome after the handshake.
func watch(inner credentials.TransportCredentials, w *wire, phases *phases) credentials.TransportCredentials {
	return watchedTLS{inner, w, phases}
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
