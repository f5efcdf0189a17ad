package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// balancer distributes connections over the replicas of a service and passes bytes on. It terminates no TLS: clients
// and replicas authenticate each other.
//
// A new connection goes to a replica that reports itself as ready, and on to the next one if that replica does not
// answer the client's first record in time: a stopped process still takes connections, by the backlog of its listener.
// Established connections are left alone. If no replica is ready, all are tried, so that clients get the service's own
// error.
type balancer struct {
	addr         string
	listener     net.Listener
	backends     []backend
	answerWithin time.Duration // a replica that is silent for longer loses the connection to the next one
	next         atomic.Uint64
	conns        sync.WaitGroup
	shut         atomic.Bool  // to newcomers
	refused      atomic.Int64 // newcomers while it was shut
	diverted     atomic.Value // string: where newcomers go in place of the replicas; empty: nowhere else
}

// backend is one listener of a replica.
type backend struct {
	addr  string
	ready *readiness
}

const (
	dialTimeout = time.Second
	// answerWithin is long for a ServerHello, and twice it is still within an agent's timeout of a handshake.
	answerWithin = 1500 * time.Millisecond
	// helloTimeout is how long a client may take to send its first record.
	helloTimeout = 10 * time.Second
)

func newBalancer(ctx context.Context, addr string, backends ...backend) (*balancer, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("listen before replicas: %w", err)
	}
	return &balancer{addr: addr, listener: l, backends: backends, answerWithin: answerWithin}, nil
}

// run passes connections on until ctx ends, which cuts them all.
func (b *balancer) run(ctx context.Context) error {
	defer b.conns.Wait()
	stop := context.AfterFunc(ctx, func() { _ = b.listener.Close() })
	defer stop()
	for {
		conn, err := b.listener.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("accept at %s: %w", b.addr, err)
		}
		if b.shut.Load() {
			b.refused.Add(1)
			_ = conn.Close()
			continue
		}
		b.conns.Go(func() { b.pass(ctx, conn) })
	}
}

// order lists the backends for one connection: those that are ready, then the others, each beginning after the one that
// was tried first last time.
func (b *balancer) order() []backend {
	n := uint64(len(b.backends))
	first := b.next.Add(1)
	ready := make([]backend, 0, n)
	var others []backend
	for i := range n {
		candidate := b.backends[(first+i)%n]
		if candidate.ready.ok() {
			ready = append(ready, candidate)
		} else {
			others = append(others, candidate)
		}
	}
	return append(ready, others...)
}

// reach opens the connection to what stands behind the balancer: a replica, or where newcomers are diverted to.
func (b *balancer) reach(ctx context.Context, hello []byte) (net.Conn, []byte, error) {
	if to, _ := b.diverted.Load().(string); to != "" {
		return ask(ctx, to, hello, 0)
	}
	return b.connect(ctx, hello)
}

// connect finds a replica that answers hello, the client's first record, and returns the connection with the first
// bytes of the answer. The wait for the last replica has no bound of ours: by then the client's own timeout ends it.
func (b *balancer) connect(ctx context.Context, hello []byte) (net.Conn, []byte, error) {
	var errs []error
	order := b.order()
	for i, candidate := range order {
		within := b.answerWithin
		if i == len(order)-1 || !isTLS(hello) {
			within = 0
		}
		conn, answer, err := ask(ctx, candidate.addr, hello, within)
		if err == nil {
			return conn, answer, nil
		}
		candidate.ready.failed()
		errs = append(errs, err)
		if ctx.Err() != nil {
			break
		}
	}
	return nil, nil, errors.Join(errs...)
}

// ask opens a connection to addr, sends hello and, if within is not zero, waits that long for the beginning of an
// answer.
func ask(ctx context.Context, addr string, hello []byte, within time.Duration) (net.Conn, []byte, error) {
	conn, err := (&net.Dialer{Timeout: dialTimeout}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	answer, err := exchange(conn, hello, within)
	if !stop() || err != nil {
		return nil, nil, errors.Join(context.Cause(ctx), err, conn.Close())
	}
	return conn, answer, nil
}

// exchange does the same as ask on an open connection.
func exchange(conn net.Conn, hello []byte, within time.Duration) ([]byte, error) {
	if _, err := conn.Write(hello); err != nil {
		return nil, fmt.Errorf("pass on to %s: %w", conn.RemoteAddr(), err)
	}
	if within == 0 {
		return nil, nil
	}
	if err := conn.SetReadDeadline(time.Now().Add(within)); err != nil {
		return nil, fmt.Errorf("wait for %s: %w", conn.RemoteAddr(), err)
	}
	answer := make([]byte, 16<<10)
	n, err := conn.Read(answer)
	if err != nil {
		return nil, fmt.Errorf("%s does not answer: %w", conn.RemoteAddr(), err)
	}
	if err := conn.SetReadDeadline(time.Time{}); err != nil {
		return nil, fmt.Errorf("wait for %s: %w", conn.RemoteAddr(), err)
	}
	return answer[:n], nil
}

const (
	recordHeader    = 5 // of TLS: type, version, length
	recordHandshake = 22
	recordMost      = 16 << 10
)

// isTLS reports whether b begins a TLS handshake, whose first record may be sent to another replica: nothing has been
// negotiated yet.
func isTLS(b []byte) bool { return len(b) >= recordHeader && b[0] == recordHandshake }

// readHello reads the client's first record, or the first bytes if it speaks another protocol.
func readHello(client net.Conn) ([]byte, error) {
	if err := client.SetReadDeadline(time.Now().Add(helloTimeout)); err != nil {
		return nil, fmt.Errorf("wait for the client: %w", err)
	}
	hello := make([]byte, recordHeader, recordHeader+recordMost)
	n, err := io.ReadAtLeast(client, hello, 1)
	if err != nil {
		return nil, fmt.Errorf("read the first record: %w", err)
	}
	if hello[0] == recordHandshake {
		if _, err := io.ReadFull(client, hello[n:]); err != nil {
			return nil, fmt.Errorf("read the first record: %w", err)
		}
		length := int(hello[3])<<8 | int(hello[4])
		if length > recordMost {
			return nil, fmt.Errorf("read the first record: it has %d bytes", length)
		}
		hello = hello[:recordHeader+length]
		if _, err := io.ReadFull(client, hello[recordHeader:]); err != nil {
			return nil, fmt.Errorf("read the first record: %w", err)
		}
		n = len(hello)
	}
	if err := client.SetReadDeadline(time.Time{}); err != nil {
		return nil, fmt.Errorf("wait for the client: %w", err)
	}
	return hello[:n], nil
}

func (b *balancer) pass(ctx context.Context, client net.Conn) {
	defer client.Close()
	stop := context.AfterFunc(ctx, func() { _ = client.Close() })
	defer stop()
	hello, err := readHello(client)
	if err != nil {
		return // it has gone, or sends nothing
	}
	replica, answer, err := b.reach(ctx, hello)
	if err != nil {
		return // the client sees a closed connection, as from any load balancer without a healthy backend
	}
	defer replica.Close()
	cut := context.AfterFunc(ctx, func() { _ = replica.Close() })
	defer cut()
	if _, err := client.Write(answer); err != nil {
		return
	}
	var both sync.WaitGroup
	for _, way := range [][2]net.Conn{{client, replica}, {replica, client}} {
		both.Go(func() {
			_, _ = io.Copy(way[0], way[1]) // either side may end at any time
			// A stream cannot use half a connection: when one side is gone, both are closed.
			_ = way[0].Close()
			_ = way[1].Close()
		})
	}
	both.Wait()
}
