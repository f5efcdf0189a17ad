package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/testkit"
)

// patience is many times as long as any step of these tests takes.
const patience = time.Minute

// firstRecord is a TLS handshake record, as far as a balancer reads one.
var firstRecord = []byte{recordHandshake, 3, 1, 0, 5, 'h', 'e', 'l', 'l', 'o'}

// replicaOf returns every connection's first record with its name, and counts them. Its health is served beside it.
type replicaOf struct {
	backend

	name  string
	conns atomic.Int64
	sick  atomic.Bool
}

func newReplica(t *testing.T, name string) *replicaOf {
	t.Helper()
	r := &replicaOf{name: name}
	ops := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if r.sick.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	t.Cleanup(ops.Close)
	lis := listen(t)
	go func() {
		for {
			conn, err := lis.Accept()
			if err != nil {
				return
			}
			r.conns.Add(1)
			go r.serve(conn)
		}
	}()
	r.backend = backend{addr: lis.Addr().String(), ready: newReadiness(ops.Listener.Addr().String())}
	return r
}

func (r *replicaOf) serve(conn net.Conn) {
	defer conn.Close()
	if _, err := io.ReadFull(conn, make([]byte, len(firstRecord))); err != nil {
		return
	}
	if _, err := conn.Write([]byte(r.name)); err != nil {
		return
	}
	_, _ = io.Copy(conn, conn)
}

// stopped is a replica that takes connections by the backlog of its listeners and never answers, as a stopped process
// does.
func stopped(t *testing.T) backend {
	t.Helper()
	return backend{addr: listen(t).Addr().String(), ready: newReadiness(listen(t).Addr().String())}
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	lis, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = lis.Close() })
	return lis
}

func balance(t *testing.T, backends ...backend) *balancer {
	t.Helper()
	b, err := newBalancer(t.Context(), "127.0.0.1:0", backends...)
	if err != nil {
		t.Fatal(err)
	}
	b.addr = b.listener.Addr().String()
	during(t, b.run)
	return b
}

// during runs f until the test ends.
func during(t *testing.T, f func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// answered returns the name of the replica that answers a new connection, and checks that the connection passes bytes
// both ways.
func (b *balancer) answered(t *testing.T) string {
	t.Helper()
	conn, err := (&net.Dialer{Timeout: patience}).DialContext(t.Context(), "tcp", b.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	for _, part := range [][]byte{firstRecord[:3], firstRecord[3:]} { // a record may come in pieces
		if _, err := conn.Write(part); err != nil {
			t.Fatal(err)
		}
	}
	name := make([]byte, 1)
	if _, err := io.ReadFull(conn, name); err != nil {
		t.Fatalf("no answer through the balancer: %v", err)
	}
	if _, err := conn.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
		t.Fatalf("the connection does not go on: %v", err)
	}
	return string(name)
}

// TestSilentReplicaLosesTheConnection: replicas were stopped a moment ago, and by their last answers they are still
// ready.
func TestSilentReplicaLosesTheConnection(t *testing.T) {
	live := newReplica(t, "a")
	silent := []backend{stopped(t), stopped(t)}
	b := balance(t, silent[0], live.backend, silent[1])
	for range 3 {
		for _, each := range b.backends {
			each.ready.ready.Store(true)
		}
		if got := b.answered(t); got != "a" {
			t.Errorf("answered by %q", got)
		}
	}
	if silent[0].ready.ok() && silent[1].ready.ok() {
		t.Error("replicas that did not answer still count as ready")
	}
}

// TestOnlyReadyReplicasGetConnections: a replica that is not ready gets none, one that is ready again does, and where
// none is ready all are tried.
func TestOnlyReadyReplicasGetConnections(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	silent := stopped(t)
	for _, each := range []backend{a.backend, b.backend, silent} {
		during(t, each.ready.run)
	}
	lb := balance(t, a.backend, b.backend, silent)
	become := func(r *replicaOf, ready bool) {
		t.Helper()
		r.sick.Store(!ready)
		testkit.Eventually(t, patience, func() error {
			if r.ready.ok() != ready {
				return fmt.Errorf("replica %s: ready %t", r.name, !ready)
			}
			return nil
		})
	}
	become(a, true)
	become(b, true)
	become(a, false)
	before := a.conns.Load()
	for range 6 {
		if got := lb.answered(t); got != "b" {
			t.Errorf("answered by %q while a is not ready", got)
		}
	}
	if n := a.conns.Load(); n != before {
		t.Errorf("%d connections to a replica that is not ready", n-before)
	}
	if silent.ready.ok() {
		t.Error("a replica that never answered counts as ready")
	}
	become(a, true)
	testkit.Eventually(t, patience, func() error {
		if got := lb.answered(t); got != "a" {
			return errors.New("the replica that is ready again gets no connection")
		}
		return nil
	})
	become(a, false)
	become(b, false)
	if got := lb.answered(t); got != "a" && got != "b" {
		t.Errorf("answered by %q while none is ready", got)
	}
}

// TestWhatIsNoHandshakeIsPassedOnOnce checks that only the first record of TLS is shown to a second replica.
func TestWhatIsNoHandshakeIsPassedOnOnce(t *testing.T) {
	a := newReplica(t, "a")
	a.ready.ready.Store(true)
	lb := balance(t, a.backend)
	conn, err := (&net.Dialer{Timeout: patience}).DialContext(t.Context(), "tcp", lb.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write([]byte("GET / HTTP")); err != nil {
		t.Fatal(err)
	}
	name := make([]byte, 1)
	if _, err := io.ReadFull(conn, name); err != nil || string(name) != "a" {
		t.Errorf("answered by %q: %v", name, err)
	}
	if n := a.conns.Load(); n != 1 {
		t.Errorf("%d connections", n)
	}
}
