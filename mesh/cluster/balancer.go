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

// balancer stands before the replicas of a service and passes bytes on. It opens no TLS: clients and replicas prove themselves to each other.
type balancer struct {
	addr     string
	listener net.Listener
	backends []string
	next     atomic.Uint64
	conns    sync.WaitGroup
	shut     atomic.Bool  // to newcomers
	refused  atomic.Int64 // newcomers while it was shut
}

func newBalancer(ctx context.Context, addr string, backends ...string) (*balancer, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("listen before replicas: %w", err)
	}
	return &balancer{addr: addr, listener: l, backends: backends}, nil
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

// dial finds a replica that takes the connection, beginning after the one that was last asked.
func (b *balancer) dial(ctx context.Context) (net.Conn, error) {
	var errs []error
	first := b.next.Add(1)
	dialer := net.Dialer{Timeout: time.Second}
	for i := range uint64(len(b.backends)) {
		conn, err := dialer.DialContext(ctx, "tcp", b.backends[(first+i)%uint64(len(b.backends))])
		if err == nil {
			return conn, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

func (b *balancer) pass(ctx context.Context, client net.Conn) {
	defer client.Close()
	replica, err := b.dial(ctx)
	if err != nil {
		return // the client sees a closed connection, as from any load balancer without a healthy backend
	}
	defer replica.Close()
	stop := context.AfterFunc(ctx, func() { _, _ = client.Close(), replica.Close() })
	defer stop()
	var both sync.WaitGroup
	for _, way := range [][2]net.Conn{{client, replica}, {replica, client}} {
		both.Go(func() {
			_, _ = io.Copy(way[0], way[1]) // either side may end at any time
			// Half a connection is no use to a stream: when one side is gone, both are.
			_ = way[0].Close()
			_ = way[1].Close()
		})
	}
	both.Wait()
}
