package calls_test

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/common/v1/commonv1connect"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/rpc/calls"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
)

// pipes is a listener whose connections are pipes in this process.
type pipes chan net.Conn

func (p pipes) Accept() (net.Conn, error) {
	conn, ok := <-p
	if !ok {
		return nil, net.ErrClosed
	}
	return conn, nil
}

func (pipes) Close() error   { return nil }
func (pipes) Addr() net.Addr { return &net.TCPAddr{} }

// frozen is a client's end of a connection to a replica that may be stopped: what is written is taken, as by the
// buffers of the kernel, and nothing comes back.
type frozen struct {
	net.Conn

	stopped *atomic.Bool
}

func (f frozen) Write(b []byte) (int, error) {
	if f.stopped.Load() {
		return len(b), nil
	}
	return f.Conn.Write(b)
}

type healthy struct {
	commonv1connect.UnimplementedHealthServiceHandler
}

func (healthy) GetHealth(context.Context, *commonv1.GetHealthRequest) (*commonv1.GetHealthResponse, error) {
	return &commonv1.GetHealthResponse{Service: "recovery"}, nil
}

// A replica that is stopped keeps its connections. A caller of the service leaves it within 10 s and reaches another
// one; until then its refusals name the service.
func TestACallerLeavesAStoppedReplica(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		authorities := rpctest.NewAuthorities(t)
		listener := make(pipes)
		cfg, err := pki.ServerTLS(pki.ServerConfig{
			Store: authorities.Service(t, "recovery"), TrustDomain: rpctest.TrustDomain, NextProtos: []string{"h2"},
		})
		if err != nil {
			t.Fatal(err)
		}
		mux := http.NewServeMux()
		mux.Handle(commonv1connect.NewHealthServiceHandler(healthy{}))
		protocols := new(http.Protocols)
		protocols.SetHTTP2(true)
		server := &http.Server{Handler: mux, Protocols: protocols, ReadHeaderTimeout: time.Minute}
		served := make(chan error, 1)
		go func() { served <- server.Serve(tls.NewListener(listener, cfg)) }()
		var stopped atomic.Bool // of the first replica
		dials := 0
		client, err := calls.HTTPClient(pki.ClientConfig{
			Roots: authorities.ServiceRoots, Server: pki.ServiceID(rpctest.TrustDomain, "recovery"),
		}, calls.HTTPConfig{Dial: func(context.Context, string, string) (net.Conn, error) {
			near, far := net.Pipe()
			listener <- far
			if dials++; dials > 1 {
				return near, nil
			}
			return frozen{Conn: near, stopped: &stopped}, nil
		}})
		if err != nil {
			t.Fatal(err)
		}
		health := commonv1connect.NewHealthServiceClient(client, "https://recovery.example",
			calls.Options(calls.Config{Peer: "recovery", Timeout: time.Second})...)
		ask := func() error {
			_, err := health.GetHealth(t.Context(), &commonv1.GetHealthRequest{})
			return err
		}
		if err := ask(); err != nil {
			t.Fatal(err)
		}
		stopped.Store(true)
		began, refused := time.Now(), 0
		for err = ask(); err != nil; err = ask() {
			refused++
			if f, ok := fault.As(err); !ok || !strings.Contains(f.Public, "recovery") {
				t.Fatalf("refused with %v", err)
			}
			if time.Since(began) > 10*time.Second {
				t.Fatalf("the stopped replica is called still after %s: %v", time.Since(began), err)
			}
		}
		if refused == 0 || dials != 2 {
			t.Errorf("%d calls were refused, and %d connections opened", refused, dials)
		}
		client.CloseIdleConnections()
		close(listener)
		<-served // ErrClosed, of the listener
		if err := server.Close(); err != nil {
			t.Error(err)
		}
	})
}
