package port_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
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

// readSignal signals the first read of a body.
type readSignal struct {
	io.ReadCloser

	once sync.Once
	read chan<- struct{}
}

func (r *readSignal) Read(p []byte) (int, error) {
	r.once.Do(func() { r.read <- struct{}{} })
	return r.ReadCloser.Read(p)
}

// A request whose body never comes takes no place from others, and is refused long before a stream of a stranger ends.
func TestBodiesThatNeverComeDoNotBlockTheHealth(t *testing.T) {
	const stalled = 3
	testkit.IO(t)
	authorities := rpctest.NewAuthorities(t)
	read := make(chan struct{}, stalled)
	cfg := port.Config{
		Name: "people", Addr: "127.0.0.1:0", TLS: authorities.ServerTLS(t, "readmodel"), MaxStrangers: stalled,
		StrangerTimeout: time.Hour,
	}
	cfg.TLS.Clients = nil
	server, err := port.New(t.Context(), port.Deps{
		Logger: testkit.Logger(t),
		Wrap: func(next http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("Stalled") != "" {
					r.Body = &readSignal{ReadCloser: r.Body, read: read}
				}
				next.ServeHTTP(w, r)
			})
		},
	}, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := server.MountHealth(func(context.Context) bool { return true }); err != nil {
		t.Fatal(err)
	}
	rpctest.Run(t, server)
	client := authorities.Client(t, "readmodel", nil)
	type answer struct {
		text string
		err  error
	}
	answers := make(chan answer, stalled)
	for range stalled {
		body, writer := io.Pipe()
		t.Cleanup(func() { _ = writer.Close() })
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL()+"/grpc.health.v1.Health/Check",
			body)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Stalled", "yes")
		go func() {
			resp, err := client.Do(req)
			if err != nil {
				answers <- answer{err: err}
				return
			}
			text, err := io.ReadAll(resp.Body)
			answers <- answer{string(text), errors.Join(err, resp.Body.Close())}
		}()
	}
	for range stalled {
		<-read
	}
	got, err := checker(client, server.URL()).CallUnary(t.Context(), connect.NewRequest(&healthv1.HealthCheckRequest{}))
	if err != nil || got.Msg.GetStatus() != healthv1.HealthCheckResponse_SERVING {
		t.Fatalf("beside %d bodies that never come: %v, %v", stalled, got, err)
	}
	for range stalled {
		if a := <-answers; a.err != nil || !strings.Contains(a.text, "deadline_exceeded") {
			t.Errorf("a body that never came: %q, %v", a.text, a.err)
		}
	}
}

// Streams of reflection take no places of health, and those of one address not all places of reflection.
func TestReflectionHasPlacesOfItsOwn(t *testing.T) {
	server, client := strange(t, port.Config{MaxStrangers: 4, StrangerTimeout: time.Hour},
		func(context.Context) bool { return true })
	open := func() error {
		stream := grpcreflect.NewClient(client, server.URL(), connect.WithGRPC()).NewStream(t.Context())
		t.Cleanup(func() { _, _ = stream.Close() })
		_, err := stream.ListServices()
		return err
	}
	held := 0
	var refused error
	for range 5 {
		if refused = open(); refused != nil {
			break
		}
		held++
	}
	if held != 1 || !fault.Has(fault.FromConnect(refused), commonv1.Reason_REASON_OVERLOADED) {
		t.Errorf("one address holds %d of 4 places, then %v", held, refused)
	}
	got, err := checker(client, server.URL()).CallUnary(t.Context(), connect.NewRequest(&healthv1.HealthCheckRequest{}))
	if err != nil || got.Msg.GetStatus() != healthv1.HealthCheckResponse_SERVING {
		t.Errorf("health beside reflection: %v, %v", got, err)
	}
}

// While a probe runs, all other callers get the result of the last probe.
func TestHealthIsReturnedWhileItIsChecked(t *testing.T) {
	entered, let := make(chan struct{}), make(chan struct{})
	var checks int
	server, client := strange(t, port.Config{}, func(context.Context) bool {
		if checks++; checks > 1 {
			close(entered)
			<-let
		}
		return true
	})
	check := checker(client, server.URL())
	first := make(chan error, 1)
	ask := func(ctx context.Context) error {
		resp, err := check.CallUnary(ctx, connect.NewRequest(&healthv1.HealthCheckRequest{}))
		if err == nil && resp.Msg.GetStatus() != healthv1.HealthCheckResponse_SERVING {
			err = errors.New(resp.Msg.GetStatus().String())
		}
		return err
	}
	if err := ask(t.Context()); err != nil {
		t.Fatal(err)
	}
	go func() {
		for { // until this probe runs
			err := ask(t.Context())
			select {
			case <-entered:
				first <- err
				return
			default:
			}
			if err != nil {
				first <- err
				return
			}
		}
	}()
	<-entered
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := ask(ctx); err != nil {
		t.Errorf("during a look: %v", err)
	}
	close(let)
	if err := <-first; err != nil {
		t.Errorf("who looked: %v", err)
	}
}
