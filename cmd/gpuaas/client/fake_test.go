package client_test

import (
	"bytes"
	"context"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/mesh/cmd/gpuaas/client"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/contexts"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1/readmodelv1connect"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/rpc/port"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
	"github.com/gpuaas/mesh/internal/testkit"
)

const token = "gps_test"

// fake is the mesh's API with answers of the test's choice, behind the same port, policies and validation as the real
// one.
type fake struct {
	readmodelv1connect.UnimplementedQueryServiceHandler
	readmodelv1connect.UnimplementedCommandServiceHandler
	readmodelv1connect.UnimplementedIncidentServiceHandler
	readmodelv1connect.UnimplementedFindingServiceHandler
	readmodelv1connect.UnimplementedNotificationServiceHandler
	readmodelv1connect.UnimplementedReleaseServiceHandler
	readmodelv1connect.UnimplementedInstanceServiceHandler
	readmodelv1connect.UnimplementedAuditServiceHandler
	readmodelv1connect.UnimplementedRollbackServiceHandler
	readmodelv1connect.UnimplementedHostFactsServiceHandler
	readmodelv1connect.UnimplementedKeyServiceHandler
	readmodelv1connect.UnimplementedTokenServiceHandler
	readmodelv1connect.UnimplementedActionServiceHandler
	readmodelv1connect.UnimplementedProfileServiceHandler
	readmodelv1connect.UnimplementedDiagnosticsServiceHandler
	readmodelv1connect.UnimplementedTrustServiceHandler
	readmodelv1connect.UnimplementedBundleServiceHandler
	readmodelv1connect.UnimplementedAuthorityServiceHandler
	readmodelv1connect.UnimplementedRetentionServiceHandler
	readmodelv1connect.UnimplementedProjectionServiceHandler
	readmodelv1connect.UnimplementedEventServiceHandler
	readmodelv1connect.UnimplementedPeopleServiceHandler

	path string // of the contexts file

	mu       sync.Mutex
	tokens   map[string]string // valid tokens, with their subjects
	shown    map[string]bool   // all tokens that clients sent
	answers  map[string]func(any) (connect.AnyResponse, error)
	watch    func(context.Context, *readmodelv1.WatchRequest, func(*readmodelv1.WatchResponse) error) error
	requests []proto.Message
	ended    int // requests
	bundle   func(send func(*readmodelv1.EscalateResponse) error) error
}

// answer sets the function that answers a method, by the method's name.
func answer[Q, A any](f *fake, method string, fn func(*Q) (*A, error)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.answers[method] = func(req any) (connect.AnyResponse, error) {
		a, err := fn(req.(*Q))
		if err != nil {
			return nil, err
		}
		return connect.NewResponse(a), nil
	}
}

// always sets one answer for a method.
func always[A any](f *fake, method string, a *A) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.answers[method] = func(any) (connect.AnyResponse, error) { return connect.NewResponse(a), nil }
}

// refuse sets a method's refusal.
func refuse(f *fake, method string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.answers[method] = func(any) (connect.AnyResponse, error) { return nil, err }
}

// sent returns the requests of one type, in order.
func sent[Q proto.Message](f *fake) []Q {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []Q
	for _, req := range f.requests {
		if q, ok := req.(Q); ok {
			out = append(out, q)
		}
	}
	return out
}

// WrapUnary answers instead of the handlers.
func (f *fake) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		message, _ := req.Any().(proto.Message)
		f.mu.Lock()
		f.requests = append(f.requests, proto.Clone(message))
		procedure := req.Spec().Procedure
		fn := f.answers[procedure[strings.LastIndex(procedure, "/")+1:]]
		f.mu.Unlock()
		if fn == nil {
			return next(ctx, req)
		}
		defer f.answered()
		return fn(req.Any())
	}
}

// answered orders the function of a request that has ended before those of later requests, which may use the same
// variables: a request that comes after a response is not enough for the race detector.
func (f *fake) answered() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ended++
}

func (f *fake) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (f *fake) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

// Watch implements the one stream.
func (f *fake) Watch(ctx context.Context, req *readmodelv1.WatchRequest,
	stream *connect.ServerStream[readmodelv1.WatchResponse],
) error {
	f.mu.Lock()
	f.requests = append(f.requests, proto.Clone(req))
	watch := f.watch
	f.mu.Unlock()
	if watch == nil {
		return fault.New(commonv1.Reason_REASON_UNIMPLEMENTED, "")
	}
	defer f.answered()
	return watch(ctx, req, stream.Send)
}

func (f *fake) watching(
	fn func(context.Context, *readmodelv1.WatchRequest, func(*readmodelv1.WatchResponse) error) error,
) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.watch = fn
}

// WhoAmI returns the person behind a token.
func (f *fake) WhoAmI(ctx context.Context, _ *readmodelv1.WhoAmIRequest) (*readmodelv1.WhoAmIResponse, error) {
	who, _ := rpc.PersonFrom(ctx)
	return &readmodelv1.WhoAmIResponse{Subject: who.Subject, Roles: who.Roles}, nil
}

// good makes a token the valid one of a subject, and ends the subject's earlier tokens.
func (f *fake) good(token, subject string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for other, whose := range f.tokens {
		if whose == subject {
			delete(f.tokens, other)
		}
	}
	f.tokens[token] = subject
}

// mesh starts a fake, with a context for it that is current.
func mesh(t *testing.T) *fake {
	t.Helper()
	f := &fake{
		answers: map[string]func(any) (connect.AnyResponse, error){}, path: filepath.Join(t.TempDir(), "contexts.yaml"),
		tokens: map[string]string{token: "op@example.test"}, shown: map[string]bool{},
	}
	authorities := rpctest.NewAuthorities(t)
	tls := authorities.ServerTLS(t, "readmodel")
	tls.Clients = nil
	server, err := port.New(t.Context(), port.Deps{
		Logger: testkit.Logger(t),
		Authenticate: func(_ context.Context, _ string, header http.Header) (rpc.Person, error) {
			f.mu.Lock()
			defer f.mu.Unlock()
			shown := strings.TrimPrefix(header.Get("Authorization"), "Bearer ")
			f.shown[shown] = true
			subject, good := f.tokens[shown]
			if !good {
				return rpc.Person{}, fault.New(commonv1.Reason_REASON_UNAUTHENTICATED, "")
			}
			return rpc.Person{Subject: subject, Roles: []string{"operator", "security"}}, nil
		},
	}, port.Config{Name: "console", Addr: "127.0.0.1:0", TLS: tls})
	if err != nil {
		t.Fatal(err)
	}
	options := append(server.HandlerOptions(), connect.WithInterceptors(f))
	for _, mount := range []func() (string, http.Handler){
		func() (string, http.Handler) { return readmodelv1connect.NewQueryServiceHandler(f, options...) },
		func() (string, http.Handler) { return readmodelv1connect.NewCommandServiceHandler(f, options...) },
		func() (string, http.Handler) { return readmodelv1connect.NewIncidentServiceHandler(f, options...) },
		func() (string, http.Handler) { return readmodelv1connect.NewFindingServiceHandler(f, options...) },
		func() (string, http.Handler) { return readmodelv1connect.NewNotificationServiceHandler(f, options...) },
		func() (string, http.Handler) { return readmodelv1connect.NewReleaseServiceHandler(f, options...) },
		func() (string, http.Handler) { return readmodelv1connect.NewInstanceServiceHandler(f, options...) },
		func() (string, http.Handler) { return readmodelv1connect.NewAuditServiceHandler(f, options...) },
		func() (string, http.Handler) { return readmodelv1connect.NewRollbackServiceHandler(f, options...) },
		func() (string, http.Handler) { return readmodelv1connect.NewHostFactsServiceHandler(f, options...) },
		func() (string, http.Handler) { return readmodelv1connect.NewKeyServiceHandler(f, options...) },
		func() (string, http.Handler) { return readmodelv1connect.NewTokenServiceHandler(f, options...) },
		func() (string, http.Handler) { return readmodelv1connect.NewActionServiceHandler(f, options...) },
		func() (string, http.Handler) { return readmodelv1connect.NewProfileServiceHandler(f, options...) },
		func() (string, http.Handler) { return readmodelv1connect.NewDiagnosticsServiceHandler(f, options...) },
		func() (string, http.Handler) { return readmodelv1connect.NewTrustServiceHandler(f, options...) },
		func() (string, http.Handler) { return readmodelv1connect.NewBundleServiceHandler(f, options...) },
		func() (string, http.Handler) { return readmodelv1connect.NewAuthorityServiceHandler(f, options...) },
		func() (string, http.Handler) { return readmodelv1connect.NewRetentionServiceHandler(f, options...) },
		func() (string, http.Handler) { return readmodelv1connect.NewProjectionServiceHandler(f, options...) },
		func() (string, http.Handler) { return readmodelv1connect.NewEventServiceHandler(f, options...) },
		func() (string, http.Handler) { return readmodelv1connect.NewEscalationServiceHandler(f, options...) },
		func() (string, http.Handler) { return readmodelv1connect.NewPeopleServiceHandler(f, options...) },
	} {
		path, handler := mount()
		if err := server.Mount(path, handler); err != nil {
			t.Fatal(err)
		}
	}
	rpctest.Run(t, server)
	if err := contexts.Put(f.path, contexts.Context{
		Name: "test", Server: server.Addr().String(), TrustDomain: rpctest.TrustDomain,
		CAPEM: string(authorities.ServiceRoots.PEM()), Token: token,
	}, true); err != nil {
		t.Fatal(err)
	}
	isolate(t, f.path)
	return f
}

// isolate keeps the environment of the user who runs the tests from affecting them.
func isolate(t *testing.T, path string) {
	t.Helper()
	for _, name := range []string{
		"GPUAAS_SERVER", "GPUAAS_TOKEN_FILE", "GPUAAS_CA_FILE", "GPUAAS_CONTEXT",
		"GPUAAS_TENANT",
	} {
		t.Setenv(name, "")
	}
	t.Setenv(contexts.EnvPath, path)
}

// result is the output and the exit code of a command line.
type result struct {
	out, err string
	code     int
}

// call runs a command line in this process.
func call(t *testing.T, args ...string) result {
	t.Helper()
	return callIn(t.Context(), nil, args...)
}

func callIn(ctx context.Context, stdin []byte, args ...string) result {
	var out, errOut bytes.Buffer
	program := kit.New()
	root := &cobra.Command{Use: "gpuaas"}
	client.Attach(program, root)
	root.SetArgs(args)
	root.SetIn(bytes.NewReader(stdin))
	root.SetOut(&out)
	root.SetErr(&errOut)
	err := root.ExecuteContext(ctx)
	exit.Report(&errOut, err, program.JSON())
	return result{out.String(), errOut.String(), exit.CodeOf(err)}
}

func (r result) wants(t *testing.T, code int) result {
	t.Helper()
	if r.code != code {
		t.Fatalf("exit %d, want %d\nstdout: %s\nstderr: %s", r.code, code, r.out, r.err)
	}
	return r
}

// golden compares with a file of testdata; GPUAAS_UPDATE_GOLDEN=1 writes it.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if os.Getenv("GPUAAS_UPDATE_GOLDEN") != "" {
		if err := os.WriteFile(path, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs: got\n%s\nwant\n%s", path, got, want)
	}
}

// goldenJSON requires that got has every field of the file, with its value. got may have more fields, because messages
// grow.
func goldenJSON(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if os.Getenv("GPUAAS_UPDATE_GOLDEN") != "" {
		write(t, path, got, 0o600)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var want, have any
	decode(t, string(text), &want)
	decode(t, got, &have)
	if diff := cmp.Diff(want, narrow(want, have)); diff != "" {
		t.Errorf("%s differs (-want +got):\n%s", path, diff)
	}
}

// narrow removes from have the fields that want does not have.
func narrow(want, have any) any {
	switch w := want.(type) {
	case map[string]any:
		h, ok := have.(map[string]any)
		if !ok {
			return have
		}
		out := map[string]any{}
		for field, value := range w {
			if got, ok := h[field]; ok {
				out[field] = narrow(value, got)
			}
		}
		return out
	case []any:
		h, ok := have.([]any)
		if !ok || len(h) != len(w) {
			return have
		}
		out := make([]any, len(w))
		for i := range w {
			out[i] = narrow(w[i], h[i])
		}
		return out
	}
	return have
}

func at(second int) *timestamppb.Timestamp {
	return timestamppb.New(time.Date(2026, 1, 2, 3, 4, second, 500_000_000, time.UTC))
}
