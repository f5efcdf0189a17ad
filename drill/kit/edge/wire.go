package edge

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// Wire is a proxy before a port that ends no TLS: it passes the bytes of connections on, or keeps those of one
// direction back, and cuts them all. What is kept back at a cut is lost, as on a network.
type Wire struct {
	listener net.Listener
	upstream string
	up, down direction
	passing  sync.WaitGroup
	end      context.CancelFunc

	mu     sync.Mutex
	closed bool
	silent bool              // the upstream sees no end of a connection before that of the wire
	conns  map[net.Conn]bool // both ends of each connection; true: that of the client
}

// StartWire starts a wire at a free port of the loopback interface, which passes on to upstream.
func StartWire(ctx context.Context, upstream string) (*Wire, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("start wire: %w", err)
	}
	w := &Wire{listener: listener, upstream: upstream, conns: map[net.Conn]bool{}}
	ctx, w.end = context.WithCancel(context.WithoutCancel(ctx))
	w.passing.Go(func() { w.accept(ctx) })
	return w, nil
}

// Addr returns the address that clients connect to.
func (w *Wire) Addr() string { return w.listener.Addr().String() }

// KeepUp keeps the bytes of clients back from now on, or passes on those that were kept and all that follow.
func (w *Wire) KeepUp(keep bool) { w.up.set(keep) }

// KeepDown keeps the bytes for clients back from now on, or passes on those that were kept and all that follow.
func (w *Wire) KeepDown(keep bool) { w.down.set(keep) }

// KeptUp returns how many bytes of clients were kept back since the wire was started.
func (w *Wire) KeptUp() int64 { return w.up.count() }

// KeptDown returns how many bytes for clients were kept back since the wire was started.
func (w *Wire) KeptDown() int64 { return w.down.count() }

// PassUp passes on what was kept back of clients when KeptUp returned count, and keeps the rest.
func (w *Wire) PassUp(count int64) {
	w.up.mu.Lock()
	defer w.up.mu.Unlock()
	w.up.pass(count)
}

// Connections returns how many connections are open.
func (w *Wire) Connections() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.conns) / 2
}

// Cut closes all connections and loses what is kept back. New connections are taken.
func (w *Wire) Cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for conn := range w.conns {
		_ = conn.Close()
	}
	w.up.lose()
	w.down.lose()
}

// CutClients closes the clients' ends of all connections and loses what is kept back. The upstream sees nothing of it
// until the wire is closed, as when packets are dropped on their way.
func (w *Wire) CutClients() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.silent = true
	for conn, client := range w.conns {
		if client {
			_ = conn.Close()
		}
	}
	w.up.lose()
	w.down.lose()
}

// Close ends the wire and waits for its connections.
func (w *Wire) Close() error {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	err := w.listener.Close()
	w.end()
	w.Cut()
	w.passing.Wait()
	return err
}

func (w *Wire) accept(ctx context.Context) {
	for {
		client, err := w.listener.Accept()
		if err != nil {
			return // closed
		}
		w.passing.Go(func() { w.join(ctx, client) })
	}
}

// join passes bytes between a client and the upstream until either has gone.
func (w *Wire) join(ctx context.Context, client net.Conn) {
	defer client.Close()
	upstream, err := (&net.Dialer{Timeout: dialTimeout}).DialContext(ctx, "tcp", w.upstream)
	if err != nil {
		return // the client sees a closed connection
	}
	defer upstream.Close()
	if !w.open(client, upstream) {
		return
	}
	defer w.forget(client, upstream)
	var both sync.WaitGroup
	for _, one := range []struct {
		from, to net.Conn
		by       *direction
	}{{client, upstream, &w.up}, {upstream, client, &w.down}} {
		both.Go(func() {
			one.by.copy(one.from, one.to)
			_ = client.Close() // a stream cannot use half a connection
			if !w.isSilent() {
				_ = upstream.Close()
			}
		})
	}
	both.Wait()
	if w.isSilent() {
		<-ctx.Done()
	}
}

func (w *Wire) isSilent() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.silent
}

func (w *Wire) open(client, upstream net.Conn) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.conns[client], w.conns[upstream] = true, false
	return !w.closed
}

func (w *Wire) forget(ends ...net.Conn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, conn := range ends {
		delete(w.conns, conn)
	}
}

const (
	dialTimeout  = time.Second
	writeTimeout = 5 * time.Second
	// mostKept is how many bytes of a direction are kept back; a connection that sends more is closed.
	mostKept = 1 << 20
)

// direction is one of the two directions of a wire.
type direction struct {
	mu      sync.Mutex
	keep    bool
	kept    int64 // since the start
	pending []piece
	size    int64 // of pending
}

// piece is bytes that are kept back.
type piece struct {
	to    net.Conn
	bytes []byte
}

func (d *direction) count() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.kept
}

func (d *direction) set(keep bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.keep = keep
	if !keep {
		d.pass(d.kept)
	}
}

func (d *direction) lose() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.pending, d.size = nil, 0
}

// pass passes on what was kept back when count bytes had been. The caller holds the lock.
func (d *direction) pass(count int64) {
	left := count - (d.kept - d.size)
	for len(d.pending) > 0 && left > 0 {
		first := &d.pending[0]
		part := min(left, int64(len(first.bytes)))
		_ = send(first.to, first.bytes[:part]) // its connection has gone otherwise
		first.bytes = first.bytes[part:]
		left -= part
		d.size -= part
		if len(first.bytes) == 0 {
			d.pending = d.pending[1:]
		}
	}
}

func send(to net.Conn, bytes []byte) error {
	if err := to.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	_, err := to.Write(bytes)
	return err
}

// copy passes bytes on, or keeps them back, until an end has gone.
func (d *direction) copy(from, to net.Conn) {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 && d.take(to, buf[:n]) != nil {
			return
		}
		if err != nil {
			return
		}
	}
}

func (d *direction) take(to net.Conn, bytes []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.keep {
		return send(to, bytes)
	}
	if d.size+int64(len(bytes)) > mostKept {
		return errors.New("too much is kept back")
	}
	d.pending = append(d.pending, piece{to: to, bytes: append([]byte(nil), bytes...)})
	d.kept += int64(len(bytes))
	d.size += int64(len(bytes))
	return nil
}
