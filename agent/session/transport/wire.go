package transport

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc/credentials"
)

// Wire keeps the failures below grpc, which reports them only as text.
type Wire struct {
	mu    sync.Mutex
	err   error
	after time.Duration // that an edge asked for
}

// Note keeps an error unless one is kept already.
func (w *Wire) Note(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err == nil && err != nil {
		w.err = err
	}
}

func (w *Wire) limit(after time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.after = after
}

func (w *Wire) retryAfter() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.after
}

func (w *Wire) first() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

// watched notes the first failed read: in TLS 1.3 a read after the client's handshake returns the server's refusal of
// the client's certificate. It also notes the wait that an edge asks for in the control plane's place.
type watched struct {
	net.Conn
	wire  *Wire
	limit limitReader
	begin beginning
}

// Write is called by one goroutine at a time: the one that opens the connection, then grpc's writer.
func (c *watched) Write(p []byte) (int, error) { return c.begin.write(c.Conn, p) }

// Read is called by one goroutine at a time, grpc's reader.
func (c *watched) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if after := c.limit.read(p[:n]); after > 0 {
		c.wire.limit(after)
	}
	var netErr *net.OpError
	if errors.As(err, &netErr) && netErr.Op == "remote error" {
		c.wire.Note(err)
	}
	return n, err
}

// watchedTLS is TLS that keeps its failures in wire.
type watchedTLS struct {
	credentials.TransportCredentials
	wire   *Wire
	phases *Phases
}

// Watch returns TLS that keeps its failures in w, and begins the phase of Welcome after the handshake.
func Watch(inner credentials.TransportCredentials, w *Wire, phases *Phases) credentials.TransportCredentials {
	return watchedTLS{inner, w, phases}
}

func (c watchedTLS) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn,
	credentials.AuthInfo, error,
) {
	conn, info, err := c.TransportCredentials.ClientHandshake(ctx, authority, &gathered{Conn: raw})
	if err != nil {
		c.wire.Note(&HandshakeError{err})
		return nil, nil, err
	}
	c.phases.Enter(PhaseWelcome)
	return &watched{Conn: conn, wire: c.wire}, info, nil
}

func (c watchedTLS) Clone() credentials.TransportCredentials {
	return watchedTLS{c.TransportCredentials.Clone(), c.wire, c.phases}
}

// TurnedAway reports whether the other side closed the connection before the handshake was over. A replica that opens
// sessions for others does so with those that it could not serve in time.
func TurnedAway(err error) bool {
	shake, ok := errors.AsType[*HandshakeError](err)
	return ok && (errors.Is(shake.cause, io.EOF) || errors.Is(shake.cause, syscall.ECONNRESET))
}

// HandshakeError is a failed TLS handshake.
type HandshakeError struct{ cause error }

// Error returns the cause as text.
func (e *HandshakeError) Error() string { return "TLS handshake: " + e.cause.Error() }

// Unwrap returns the cause.
func (e *HandshakeError) Unwrap() error { return e.cause }
