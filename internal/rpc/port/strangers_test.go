package port_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"connectrpc.com/grpcreflect"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/rpc/port"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
	"github.com/gpuaas/mesh/internal/testkit"
)

// strange is a server for strangers: people's TLS, which asks for no certificate.
func strange(t *testing.T, cfg port.Config, ready func(context.Context) bool) (*port.Server, *http.Client) {
	t.Helper()
	testkit.IO(t)
	authorities := rpctest.NewAuthorities(t)
	cfg.Name, cfg.Addr, cfg.TLS = "people", "127.0.0.1:0", authorities.ServerTLS(t, "readmodel")
	cfg.TLS.Clients = nil
	server, err := port.New(t.Context(), port.Deps{Logger: testkit.Logger(t)}, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(server.MountHealth(ready), server.MountReflection()); err != nil {
		t.Fatal(err)
	}
	rpctest.Run(t, server)
	return server, authorities.Client(t, "readmodel", nil)
}

func checker(
	client *http.Client,
	url string,
) *connect.Client[healthv1.HealthCheckRequest, healthv1.HealthCheckResponse] {
	return connect.NewClient[healthv1.HealthCheckRequest, healthv1.HealthCheckResponse](
		client,
		url+"/grpc.health.v1.Health/Check",
		connect.WithGRPC(),
	)
}

// Health is the result of the process's own check, which is run once for many callers.
func TestHealthForStrangers(t *testing.T) {
	var up atomic.Bool
	var checks atomic.Int64
	server, client := strange(t, port.Config{}, func(context.Context) bool {
		checks.Add(1)
		return up.Load()
	})
	check := checker(client, server.URL())
	status := func() healthv1.HealthCheckResponse_ServingStatus {
		t.Helper()
		resp, err := check.CallUnary(t.Context(), connect.NewRequest(&healthv1.HealthCheckRequest{}))
		if err != nil {
			t.Fatal(err)
		}
		return resp.Msg.GetStatus()
	}
	if got := status(); got != healthv1.HealthCheckResponse_NOT_SERVING {
		t.Errorf("not ready: %s", got)
	}
	up.Store(true)
	began, asked := time.Now(), int64(1)
	testkit.Eventually(t, testkit.Patience, func() error {
		asked++
		if got := status(); got != healthv1.HealthCheckResponse_SERVING {
			return errors.New(got.String())
		}
		return nil
	})
	for range 50 {
		asked++
		if got := status(); got != healthv1.HealthCheckResponse_SERVING {
			t.Errorf("ready: %s", got)
		}
	}
	if most := int64(time.Since(began)/time.Second) + 2; checks.Load() > most {
		t.Errorf("%d looks for %d questions in %s", checks.Load(), asked, time.Since(began))
	}
	_, err := check.CallUnary(t.Context(), connect.NewRequest(&healthv1.HealthCheckRequest{Service: "gpuaas.none"}))
	if connect.CodeOf(err) != connect.CodeNotFound ||
		!fault.Has(fault.FromConnect(err), commonv1.Reason_REASON_NOT_FOUND) {
		t.Errorf("an unknown service: %v", err)
	}
	watch := connect.NewClient[healthv1.HealthCheckRequest, healthv1.HealthCheckResponse](
		client,
		server.URL()+"/grpc.health.v1.Health/Watch",
		connect.WithGRPC(),
	)
	stream, err := watch.CallServerStream(t.Context(), connect.NewRequest(&healthv1.HealthCheckRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	for stream.Receive() {
		t.Errorf("a frame: %v", stream.Msg())
	}
	if !fault.Has(fault.FromConnect(stream.Err()), commonv1.Reason_REASON_UNIMPLEMENTED) {
		t.Errorf("watch: %v", stream.Err())
	}
}

// Reflection lists what is mounted, and a stream that stays open ends after a while; so does a request whose body never
// comes.
func TestReflectionForStrangers(t *testing.T) {
	server, client := strange(
		t,
		port.Config{StrangerTimeout: 300 * time.Millisecond, MaxStrangers: 2},
		func(context.Context) bool { return true },
	)
	lasting, patient := strange(t, port.Config{StrangerTimeout: time.Hour, MaxStrangers: 2},
		func(context.Context) bool { return true })
	asked := grpcreflect.NewClient(patient, lasting.URL(), connect.WithGRPC()).NewStream(t.Context())
	services, err := asked.ListServices()
	if err != nil || !slices.Contains(services, "grpc.health.v1.Health") {
		t.Fatalf("%v, %v", services, err)
	}
	if files, err := asked.FileContainingSymbol("grpc.health.v1.Health"); err != nil || len(files) == 0 {
		t.Errorf("%v, %v", files, err)
	}
	_, _ = asked.Close()
	reflection := grpcreflect.NewClient(client, server.URL(), connect.WithGRPC())
	var stream *grpcreflect.ClientStream
	testkit.Eventually(t, testkit.Patience, func() error { // on a busy machine one may be over before its first answer
		stream = reflection.NewStream(t.Context())
		_, err := stream.ListServices()
		return err
	})
	// The client sends nothing more: the server ends the stream.
	testkit.Eventually(t, testkit.Patience, func() error {
		if _, err := stream.ListServices(); err == nil {
			return errors.New("the stream goes on")
		}
		return nil
	})
	// Two bodies that never come take all places, and release them.
	occupy := func() (*io.PipeWriter, chan error) {
		body, writer := io.Pipe()
		done := make(chan error, 1)
		req, err := http.NewRequestWithContext(
			t.Context(),
			http.MethodPost,
			server.URL()+"/grpc.health.v1.Health/Check",
			body,
		)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		go func() {
			resp, err := client.Do(req)
			if err == nil {
				err = resp.Body.Close()
			}
			done <- err
		}()
		return writer, done
	}
	for range 2 {
		writer, done := occupy()
		t.Cleanup(func() { _ = writer.Close() })
		select {
		case <-done:
		case <-time.After(time.Minute):
			t.Fatal("a body that never comes holds its place")
		}
	}
	// A large request is refused by its size.
	resp, err := client.Post(
		server.URL()+"/grpc.health.v1.Health/Check",
		"application/json",
		strings.NewReader(`{"service":"`+strings.Repeat("a", 2<<20)+`"}`),
	)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close() // its status is enough
	if resp.StatusCode < 400 {
		t.Errorf("two MiB: %s", resp.Status)
	}
}

// Strangers have places of their own, and no more.
func TestStrangersHaveFewPlaces(t *testing.T) {
	entered, let := make(chan struct{}), make(chan struct{})
	server, client := strange(t, port.Config{MaxStrangers: 1}, func(context.Context) bool {
		entered <- struct{}{}
		<-let
		return true
	})
	check := checker(client, server.URL())
	first := make(chan error, 1)
	go func() {
		_, err := check.CallUnary(t.Context(), connect.NewRequest(&healthv1.HealthCheckRequest{}))
		first <- err
	}()
	<-entered
	_, err := check.CallUnary(t.Context(), connect.NewRequest(&healthv1.HealthCheckRequest{}))
	if !fault.Has(fault.FromConnect(err), commonv1.Reason_REASON_OVERLOADED) {
		t.Errorf("beyond the places: %v", err)
	}
	close(let)
	if err := <-first; err != nil {
		t.Errorf("the first: %v", err)
	}
}
