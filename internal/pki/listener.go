package pki

import (
	"container/list"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// ListenerConfig bounds the handshakes of a listener.
type ListenerConfig struct {
	TLS *tls.Config
	// HandshakeTimeout is how long a peer may take. Default 5 s.
	HandshakeTimeout time.Duration
	// MaxHandshakes is how many may be under way at once. Above it the one that takes longest is closed: a peer that sends
	// anything is done in milliseconds, so silent connections push out each other and not the working peers. Default 512.
	MaxHandshakes int
	// MaxConnections is how many may be open at once, handshakes included. One more is closed at once. Zero: no bound.
	MaxConnections int
	// OnReject is called with every failed handshake. It must not block. It may be nil.
	OnReject func(Reject)
	// OnHandshake is called after every finished handshake. It must not block. It may be nil.
	OnHandshake func()
}

// Listener accepts connections whose handshake is finished. It exists because net/http reports a failed handshake only
// as a line of text.
type Listener struct {
	inner  net.Listener
	cfg    ListenerConfig
	ready  chan net.Conn
	ctx    context.Context //nolint:containedctx // the life of the listener, ended by Close.
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup

	open atomic.Int64 // connections that are not closed, where there is a bound

	mu    sync.Mutex
	under *list.List // connections whose handshake is under way, the longest first
}

// NewListener wraps inner, which it owns from now on. Close ends it and waits for its goroutines.
func NewListener(ctx context.Context, inner net.Listener, cfg ListenerConfig) (*Listener, error) {
	if cfg.TLS == nil {
		return nil, errors.New("TLS listener: no configuration")
	}
	if cfg.HandshakeTimeout <= 0 {
		cfg.HandshakeTimeout = 5 * time.Second
	}
	if cfg.MaxHandshakes <= 0 {
		cfg.MaxHandshakes = 512
	}
	l := &Listener{inner: inner, cfg: cfg, ready: make(chan net.Conn), under: list.New()}
	// The listener lives until it is closed, not until the caller's context ends: a drain still accepts nothing, but
	// closes in order.
	l.ctx, l.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	l.wg.Go(l.acceptLoop)
	return l, nil
}

func (l *Listener) acceptLoop() {
	for {
		conn, err := l.inner.Accept()
		if err != nil {
			if isTemporary(err) {
				select {
				case <-l.ctx.Done():
					return
				case <-time.After(50 * time.Millisecond): // out of file descriptors: let some close
					continue
				}
			}
			l.cancel(fmt.Errorf("accept connection: %w", err))
			return
		}
		counted, ok := l.count(conn)
		if !ok {
			l.reject(Reject{Reason: RejectOverload, Remote: conn.RemoteAddr().String()})
			_ = conn.Close() // nothing was said on it
			continue
		}
		conn = counted
		place := l.enter(conn)
		l.wg.Go(func() { l.handshake(conn, place) })
	}
}

// count reserves a place among the open connections, which is released when the connection is closed.
func (l *Listener) count(conn net.Conn) (net.Conn, bool) {
	if l.cfg.MaxConnections <= 0 {
		return conn, true
	}
	if l.open.Add(1) > int64(l.cfg.MaxConnections) {
		l.open.Add(-1)
		return nil, false
	}
	return &countedConn{Conn: conn, leave: sync.OnceFunc(func() { l.open.Add(-1) })}, true
}

// countedConn is one of a listener's open connections.
type countedConn struct {
	net.Conn

	leave func()
}

// Close closes the connection and gives its place back.
func (c *countedConn) Close() error {
	defer c.leave()
	return c.Conn.Close()
}

// enter gives a connection its place among the handshakes, for which the longest handshake may be closed.
func (l *Listener) enter(conn net.Conn) *list.Element {
	l.mu.Lock()
	defer l.mu.Unlock()
	if longest := l.under.Front(); longest != nil && l.under.Len() >= l.cfg.MaxHandshakes {
		if c, ok := l.under.Remove(longest).(net.Conn); ok {
			l.reject(Reject{Reason: RejectOverload, Remote: c.RemoteAddr().String()})
			_ = c.Close() // its handshake fails by this
		}
	}
	return l.under.PushBack(conn)
}

// leave gives the place up, and returns false if it was taken away before.
func (l *Listener) leave(place *list.Element) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	before := l.under.Len()
	l.under.Remove(place) // does nothing if the element has left the list
	return l.under.Len() < before
}

func (l *Listener) handshake(conn net.Conn, place *list.Element) {
	remote := conn.RemoteAddr().String()
	tlsConn := tls.Server(conn, l.cfg.TLS)
	ctx, cancel := context.WithTimeout(l.ctx, l.cfg.HandshakeTimeout)
	err := tlsConn.HandshakeContext(ctx)
	if err != nil && ctx.Err() != nil {
		err = errors.Join(err, ctx.Err())
	}
	cancel()
	stayed := l.leave(place)
	if err != nil {
		if stayed { // else it is counted already
			rejected := ClassifyHandshake(err, l.now())
			rejected.Remote = remote
			l.reject(rejected)
		}
		_ = conn.Close() // the handshake's error is what matters
		return
	}
	if l.cfg.OnHandshake != nil {
		l.cfg.OnHandshake()
	}
	select {
	case l.ready <- tlsConn:
	case <-l.ctx.Done():
		_ = tlsConn.Close() // the listener is closing
	}
}

func (l *Listener) now() time.Time {
	return clockOr(l.cfg.TLS.Time)()
}

func (l *Listener) reject(r Reject) {
	if l.cfg.OnReject != nil {
		l.cfg.OnReject(r)
	}
}

// Accept waits for the next connection whose handshake is finished. Its connections are *tls.Conn.
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case conn := <-l.ready:
		return conn, nil
	case <-l.ctx.Done():
		return nil, net.ErrClosed
	}
}

// Close ends the listener and waits until its goroutines have ended.
func (l *Listener) Close() error {
	l.cancel(net.ErrClosed)
	err := l.inner.Close()
	l.wg.Wait()
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// Addr returns the address listened on.
func (l *Listener) Addr() net.Addr { return l.inner.Addr() }

func isTemporary(err error) bool {
	var temporary interface{ Temporary() bool }
	return errors.As(err, &temporary) && temporary.Temporary()
}
