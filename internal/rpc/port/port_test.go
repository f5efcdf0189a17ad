package port_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/prometheus/client_golang/prometheus"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1/lifecyclev1connect"
	_ "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1/readmodelv1connect"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/rpc/assertion"
	"github.com/gpuaas/mesh/internal/rpc/calls"
	"github.com/gpuaas/mesh/internal/rpc/port"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
)

// backend is a service whose methods return what a test sets.
type backend struct {
	recoveryv1connect.UnimplementedInstanceServiceHandler
	lifecyclev1connect.UnimplementedWorkspaceServiceHandler
	lifecyclev1connect.UnimplementedTaskServiceHandler
	recoveryv1connect.UnimplementedSessionServiceHandler

	retire  func(context.Context, *recoveryv1.RetireInstanceRequest) (*recoveryv1.RetireInstanceResponse, error)
	tenant  func(context.Context, *lifecyclev1.CreateTenantRequest) (*lifecyclev1.CreateTenantResponse, error)
	operate func(context.Context, *lifecyclev1.RequestOperationRequest) (*lifecyclev1.RequestOperationResponse, error)
	whoami  func(context.Context, *readmodelv1.WhoAmIRequest) (*readmodelv1.WhoAmIResponse, error)
	work    func(context.Context, *lifecyclev1.WatchWorkRequest, *workStream) error
	view    func(context.Context, *authorityStream) error
}

type (
	workStream      = connect.ServerStream[lifecyclev1.WatchWorkResponse]
	authorityStream = connect.BidiStream[recoveryv1.WatchAuthorityRequest, recoveryv1.WatchAuthorityResponse]
)

func (b *backend) RetireInstance(ctx context.Context,
	req *recoveryv1.RetireInstanceRequest,
) (*recoveryv1.RetireInstanceResponse, error) {
	return b.retire(ctx, req)
}

func (b *backend) CreateTenant(ctx context.Context,
	req *lifecyclev1.CreateTenantRequest,
) (*lifecyclev1.CreateTenantResponse, error) {
	return b.tenant(ctx, req)
}

func (b *backend) RequestOperation(ctx context.Context,
	req *lifecyclev1.RequestOperationRequest,
) (*lifecyclev1.RequestOperationResponse, error) {
	return b.operate(ctx, req)
}

// console is the part of a backend that people call.
type console struct {
	readmodelv1connect.UnimplementedQueryServiceHandler

	*backend
}

func (b console) WhoAmI(ctx context.Context, req *readmodelv1.WhoAmIRequest) (*readmodelv1.WhoAmIResponse, error) {
	return b.whoami(ctx, req)
}

func (b *backend) WatchWork(
	ctx context.Context, req *lifecyclev1.WatchWorkRequest, stream *connect.ServerStream[lifecyclev1.WatchWorkResponse],
) error {
	return b.work(ctx, req, stream)
}

func (b *backend) WatchAuthority(
	ctx context.Context, stream *connect.BidiStream[recoveryv1.WatchAuthorityRequest, recoveryv1.WatchAuthorityResponse],
) error {
	return b.view(ctx, stream)
}

// lines collects a log.
type lines struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

type fixture struct {
	*rpctest.Authorities
	server   *port.Server
	log      *lines
	registry *prometheus.Registry
	key      ed25519.PrivateKey // of asserter
	asserter *assertion.Signer
	rejects  chan pki.Reject
}

// start runs a server of `recovery` with all of the backend's services.
func start(t *testing.T, b *backend, edit func(*port.Deps, *port.Config)) *fixture {
	t.Helper()
	f := prepare(t, b, edit)
	rpctest.Run(t, f.server)
	return f
}

func prepare(t *testing.T, b *backend, edit func(*port.Deps, *port.Config)) *fixture {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	f := &fixture{
		Authorities: rpctest.NewAuthorities(t), log: &lines{}, registry: prometheus.NewRegistry(),
		key: key, asserter: assertion.NewSigner(key, nil), rejects: make(chan pki.Reject, 64),
	}
	keys, err := f.asserter.KeySet()
	if err != nil {
		t.Fatal(err)
	}
	deps := port.Deps{
		Logger:     slog.New(obs.Handler(slog.NewJSONHandler(f.log, &slog.HandlerOptions{Level: slog.LevelDebug}))),
		Registerer: f.registry,
		Persons:    assertion.NewVerifier(keys, nil),
		OnReject: func(r pki.Reject) {
			select {
			case f.rejects <- r:
			default:
			}
		},
		Authenticate: func(_ context.Context, _ string, header http.Header) (rpc.Person, error) {
			if header.Get("Authorization") != "Bearer good" {
				return rpc.Person{}, fault.New(commonv1.Reason_REASON_UNAUTHENTICATED, "")
			}
			return rpc.Person{Subject: "ada", Roles: []string{"viewer"}}, nil
		},
	}
	cfg := port.Config{
		Name: "internal", Addr: "127.0.0.1:0", TLS: f.ServerTLS(t, "recovery"),
		DrainTimeout: time.Minute,
	}
	if edit != nil {
		edit(&deps, &cfg)
	}
	f.server, err = port.New(t.Context(), deps, cfg)
	if err != nil {
		t.Fatal(err)
	}
	opts := f.server.HandlerOptions()
	f.mount(t)(recoveryv1connect.NewInstanceServiceHandler(b, opts...))
	f.mount(t)(recoveryv1connect.NewSessionServiceHandler(b, opts...))
	f.mount(t)(lifecyclev1connect.NewWorkspaceServiceHandler(b, opts...))
	f.mount(t)(lifecyclev1connect.NewTaskServiceHandler(b, opts...))
	f.mount(t)(readmodelv1connect.NewQueryServiceHandler(console{backend: b}, opts...))
	return f
}

func (f *fixture) mount(t *testing.T) func(string, http.Handler) {
	t.Helper()
	return func(path string, handler http.Handler) {
		t.Helper()
		if err := f.server.Mount(path, handler); err != nil {
			t.Fatal(err)
		}
	}
}

func (f *fixture) instances(t *testing.T, caller string) recoveryv1connect.InstanceServiceClient {
	t.Helper()
	return recoveryv1connect.NewInstanceServiceClient(
		f.Client(t, "recovery", f.Service(t, caller)), f.server.URL(), calls.Options(calls.Config{})...)
}

func (f *fixture) workspaces(t *testing.T, caller string, asserter *assertion.Signer,
	more ...connect.ClientOption,
) lifecyclev1connect.WorkspaceServiceClient {
	t.Helper()
	return lifecyclev1connect.NewWorkspaceServiceClient(f.Client(t, "recovery", f.Service(t, caller)), f.server.URL(),
		append(calls.Options(calls.Config{Asserter: asserter}), more...)...)
}

func retireRequest() *recoveryv1.RetireInstanceRequest {
	return &recoveryv1.RetireInstanceRequest{InstanceId: ids.New(), WorkspaceId: ids.New(), Epoch: 1, Reason: "ended"}
}

func want(t *testing.T, err error, reason commonv1.Reason) {
	t.Helper()
	if err == nil || fault.ReasonOf(err) != reason {
		t.Errorf("got %v, want %v", err, reason)
	}
}

func TestEveryMethodOfTheMeshHasAPolicy(t *testing.T) {
	if n := rpctest.EveryMethodHasPolicy(t, "gpuaas."); n < 20 {
		t.Errorf("only %d methods were walked", n)
	}
}

// Scenario: A18.
func TestEveryMethodRefusesWhoIsNotInItsList(t *testing.T) {
	f := start(t, &backend{}, nil)
	n := rpctest.RefusesEveryMethod(t, rpctest.Target{
		URL: f.server.URL(), Service: "recovery", Authorities: f.Authorities, Services: f.server.Services(),
	})
	if n < 50 {
		t.Errorf("only %d calls were made", n)
	}
}

// The same with a port that admits clients without a certificate: the allow-list must hold without the handshake's
// help.
func TestAllowListsApplyWhereCertificatesAreOptional(t *testing.T) {
	f := start(t, &backend{}, func(_ *port.Deps, cfg *port.Config) { cfg.TLS.Optional = true })
	rpctest.RefusesEveryMethod(t, rpctest.Target{
		URL: f.server.URL(), Service: "recovery", Authorities: f.Authorities, Services: f.server.Services(),
	})
	if strings.Contains(f.log.String(), "not implemented") {
		t.Error("a method was reached")
	}
}

func TestCallerAndCorrelationReachTheMethod(t *testing.T) {
	var peer pki.Peer
	var correlation obs.Correlation
	f := start(t, &backend{retire: func(
		ctx context.Context, _ *recoveryv1.RetireInstanceRequest,
	) (*recoveryv1.RetireInstanceResponse, error) {
		peer, _ = rpc.PeerFrom(ctx)
		correlation = obs.From(ctx)
		return &recoveryv1.RetireInstanceResponse{}, nil
	}}, nil)
	sent := obs.Correlation{CorrelationID: ids.New(), WorkspaceID: ids.New(), NodeID: ids.New()}
	if _, err := f.instances(t, "lifecycle").RetireInstance(obs.With(t.Context(), sent), retireRequest()); err != nil {
		t.Fatal(err)
	}
	if peer.ID != pki.ServiceID(rpctest.TrustDomain, "lifecycle") {
		t.Errorf("peer = %s", peer.ID)
	}
	if correlation != sent {
		t.Errorf("correlation = %+v", correlation)
	}
	if !strings.Contains(f.log.String(), sent.CorrelationID) {
		t.Error("the request's log line lacks its correlation id")
	}
}

func TestErrorsLeaveWithoutTheirCause(t *testing.T) {
	secret := "pq: password authentication failed for host 10.1.2.3"
	tests := []struct {
		name   string
		fail   func() error
		reason commonv1.Reason
	}{
		{
			"a driver's error", func() error { return fmt.Errorf("read instance: %w", errors.New(secret)) },
			commonv1.Reason_REASON_INTERNAL,
		},
		{"a fault with a cause", func() error {
			return fault.New(commonv1.Reason_REASON_EPOCH_ENDED, "", fault.Cause(errors.New(secret)))
		}, commonv1.Reason_REASON_EPOCH_ENDED},
		{"a wrapped fault", func() error {
			return fmt.Errorf("retire instance: %w",
				fault.New(commonv1.Reason_REASON_CONFLICT, "", fault.Cause(errors.New(secret))))
		}, commonv1.Reason_REASON_CONFLICT},
		{"a panic", func() error { panic(secret) }, commonv1.Reason_REASON_INTERNAL},
		{"a peer's wire error", func() error {
			return connect.NewWireError(connect.CodePermissionDenied, errors.New(secret))
		}, commonv1.Reason_REASON_INTERNAL},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := start(t, &backend{retire: func(
				context.Context, *recoveryv1.RetireInstanceRequest,
			) (*recoveryv1.RetireInstanceResponse, error) {
				return nil, tt.fail()
			}}, nil)
			id := ids.New()
			_, err := f.instances(t, "lifecycle").RetireInstance(obs.With(t.Context(), obs.Correlation{CorrelationID: id}),
				retireRequest())
			want(t, err, tt.reason)
			if strings.Contains(err.Error(), "password") {
				t.Errorf("the cause left: %v", err)
			}
			refusal, ok := fault.As(err)
			if !ok || refusal.CorrelationID != id {
				t.Errorf("no correlation id in %v", err)
			}
			if got := strings.Count(f.log.String(), "password"); got != 1 {
				t.Errorf("the cause is logged %d times", got)
			}
		})
	}
}

func TestBadRequestsNameEveryViolation(t *testing.T) {
	f := start(t, &backend{}, nil)
	_, err := f.instances(t, "lifecycle").RetireInstance(t.Context(),
		&recoveryv1.RetireInstanceRequest{InstanceId: "x", WorkspaceId: "y"})
	want(t, err, commonv1.Reason_REASON_INVALID_ARGUMENT)
	refusal, _ := fault.As(err)
	text := strings.Join(refusal.Unmet, "\n")
	for _, field := range []string{"instance_id", "workspace_id", "epoch"} {
		if !strings.Contains(text, field) {
			t.Errorf("%s is not named in %q", field, text)
		}
	}
}

func TestMessagesAreBounded(t *testing.T) {
	f := start(t, &backend{}, nil)
	req := retireRequest()
	req.Reason = strings.Repeat("x", 2<<20)
	_, err := f.instances(t, "lifecycle").RetireInstance(t.Context(), req)
	want(t, err, commonv1.Reason_REASON_FRAME_TOO_LARGE)
}

func TestPersonsAreAsserted(t *testing.T) {
	var got rpc.Person
	f := start(t, &backend{
		tenant: func(ctx context.Context, _ *lifecyclev1.CreateTenantRequest) (*lifecyclev1.CreateTenantResponse, error) {
			got, _ = rpc.PersonFrom(ctx)
			return &lifecyclev1.CreateTenantResponse{}, nil
		},
		operate: func(ctx context.Context, _ *lifecyclev1.RequestOperationRequest) (*lifecyclev1.RequestOperationResponse,
			error,
		) {
			got, _ = rpc.PersonFrom(ctx)
			return &lifecyclev1.RequestOperationResponse{}, nil
		},
	}, nil)
	ada := rpc.Person{Subject: "ada", Roles: []string{"operator"}}
	req := &lifecyclev1.CreateTenantRequest{Name: "acme"}

	t.Run("good, and again with a fresh one", func(t *testing.T) {
		client := f.workspaces(t, "readmodel", f.asserter)
		for range 2 {
			if _, err := client.CreateTenant(rpc.WithPerson(t.Context(), ada), req); err != nil {
				t.Fatal(err)
			}
		}
		if got.Subject != "ada" || got.TenantID != "" || !got.Operator() {
			t.Errorf("person = %+v", got)
		}
	})
	t.Run("with the role, and bound to a tenant", func(t *testing.T) {
		bea := rpc.Person{Subject: "bea", TenantID: "acme", Roles: []string{"operator"}}
		_, err := f.workspaces(t, "readmodel", f.asserter).CreateTenant(rpc.WithPerson(t.Context(), bea), req)
		want(t, err, commonv1.Reason_REASON_PERMISSION_DENIED)
		if fault.From(err).Public != "this is for people of the operator" {
			t.Errorf("%v: the tenant was not asserted", err)
		}
	})
	t.Run("without the role", func(t *testing.T) {
		bob := rpc.Person{Subject: "bob", Roles: []string{"viewer"}}
		_, err := f.workspaces(t, "readmodel", f.asserter).CreateTenant(rpc.WithPerson(t.Context(), bob), req)
		want(t, err, commonv1.Reason_REASON_PERMISSION_DENIED)
	})
	t.Run("without a person", func(t *testing.T) {
		_, err := f.workspaces(t, "readmodel", f.asserter).CreateTenant(t.Context(), req)
		want(t, err, commonv1.Reason_REASON_ASSERTION_INVALID)
	})
	t.Run("where one is optional, readmodel still needs one", func(t *testing.T) {
		_, err := f.workspaces(t, "readmodel", f.asserter).RequestOperation(t.Context(),
			&lifecyclev1.RequestOperationRequest{})
		want(t, err, commonv1.Reason_REASON_ASSERTION_INVALID)
	})
	t.Run("by another key", func(t *testing.T) {
		_, other, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		_, err = f.workspaces(t, "readmodel", assertion.NewSigner(other, nil)).CreateTenant(rpc.WithPerson(t.Context(), ada),
			req)
		want(t, err, commonv1.Reason_REASON_ASSERTION_INVALID)
	})
	for name, offset := range map[string]time.Duration{"too old": -61 * time.Second, "from the future": 6 * time.Second} {
		t.Run(name, func(t *testing.T) {
			shifted := assertion.NewSigner(f.key, func() time.Time { return time.Now().Add(offset) })
			_, err := f.workspaces(t, "readmodel", shifted).CreateTenant(rpc.WithPerson(t.Context(), ada), req)
			want(t, err, commonv1.Reason_REASON_ASSERTION_INVALID)
		})
	}
	t.Run("by a service that may not call", func(t *testing.T) {
		_, err := f.workspaces(t, "nodeapi", f.asserter).CreateTenant(rpc.WithPerson(t.Context(), ada), req)
		want(t, err, commonv1.Reason_REASON_PERMISSION_DENIED)
	})
}

// tamper changes a request after it was signed.
type tamper struct{ edit func(http.Header, any) }

func (c tamper) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		c.edit(req.Header(), req.Any())
		return next(ctx, req)
	}
}

func (c tamper) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (c tamper) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

func TestAssertionsAreGoodForOneRequestOnce(t *testing.T) {
	reached := 0
	f := start(t, &backend{tenant: func(
		context.Context, *lifecyclev1.CreateTenantRequest,
	) (*lifecyclev1.CreateTenantResponse, error) {
		reached++
		return &lifecyclev1.CreateTenantResponse{}, nil
	}}, nil)
	ctx := rpc.WithPerson(t.Context(), rpc.Person{Subject: "ada", Roles: []string{"operator"}})
	call := func(t *testing.T, name string, edit func(http.Header, any)) error {
		t.Helper()
		client := f.workspaces(t, "readmodel", f.asserter, connect.WithInterceptors(tamper{edit}))
		_, err := client.CreateTenant(ctx, &lifecyclev1.CreateTenantRequest{Name: name})
		return err
	}
	var captured string
	if err := call(t, "acme", func(h http.Header, _ any) { captured = h.Get(assertion.Header) }); err != nil {
		t.Fatal(err)
	}
	if reached != 1 {
		t.Fatal("the method was not reached")
	}
	tests := []struct {
		name string
		edit func(http.Header, any)
	}{
		{"replayed", func(h http.Header, _ any) { h.Set(assertion.Header, captured) }},
		{"with another message", func(_ http.Header, m any) { m.(*lifecyclev1.CreateTenantRequest).Name = "evil" }},
		{"stripped", func(h http.Header, _ any) { h.Del(assertion.Header) }},
		{"twice", func(h http.Header, _ any) { h.Add(assertion.Header, captured) }},
		{"truncated", func(h http.Header, _ any) { h.Set(assertion.Header, h.Get(assertion.Header)[:40]) }},
		{"signature changed", func(h http.Header, _ any) {
			v := []byte(h.Get(assertion.Header))
			v[len(v)-4] ^= 1
			h.Set(assertion.Header, string(v))
		}},
		{"garbage", func(h http.Header, _ any) { h.Set(assertion.Header, "a.b.c") }},
		{"huge", func(h http.Header, _ any) { h.Set(assertion.Header, strings.Repeat("a", 9<<10)) }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			want(t, call(t, "acme", tt.edit), commonv1.Reason_REASON_ASSERTION_INVALID)
		})
	}
	if reached != 1 {
		t.Errorf("the method was reached %d times", reached)
	}
}

func TestPersonsOfTheConsoleAreAuthenticated(t *testing.T) {
	var got rpc.Person
	f := start(t, &backend{whoami: func(ctx context.Context, _ *readmodelv1.WhoAmIRequest) (*readmodelv1.WhoAmIResponse,
		error,
	) {
		got, _ = rpc.PersonFrom(ctx)
		return &readmodelv1.WhoAmIResponse{}, nil
	}}, func(_ *port.Deps, cfg *port.Config) { cfg.TLS.Clients = nil })
	bearer := func(token string) connect.ClientOption {
		return connect.WithInterceptors(tamper{func(h http.Header, _ any) { h.Set("Authorization", "Bearer "+token) }})
	}
	for _, protocol := range map[string]connect.ClientOption{
		"grpc": connect.WithGRPC(), "grpc-web": connect.WithGRPCWeb(),
		"connect": connect.WithProtoJSON(),
	} {
		client := readmodelv1connect.NewQueryServiceClient(f.Client(t, "recovery", nil), f.server.URL(),
			append(calls.Options(calls.Config{}), bearer("good"), protocol)...)
		if _, err := client.WhoAmI(t.Context(), &readmodelv1.WhoAmIRequest{}); err != nil {
			t.Fatal(err)
		}
		if got.Subject != "ada" {
			t.Errorf("person = %+v", got)
		}
	}
	client := readmodelv1connect.NewQueryServiceClient(f.Client(t, "recovery", nil), f.server.URL(),
		append(calls.Options(calls.Config{}), bearer("bad"))...)
	_, err := client.WhoAmI(t.Context(), &readmodelv1.WhoAmIRequest{})
	want(t, err, commonv1.Reason_REASON_UNAUTHENTICATED)
}

// Scenario: A15.
func TestOnlyTheCanonicalPathIsRouted(t *testing.T) {
	reached := false
	f := start(t, &backend{retire: func(
		context.Context, *recoveryv1.RetireInstanceRequest,
	) (*recoveryv1.RetireInstanceResponse, error) {
		reached = true
		return &recoveryv1.RetireInstanceResponse{}, nil
	}}, nil)
	client := f.Client(t, "recovery", f.Service(t, "nodeapi"))
	canonical := "/gpuaas.recovery.v1.InstanceService/RetireInstance"
	for _, path := range []string{
		"/" + canonical, canonical + "/", "/./" + canonical[1:], strings.ToLower(canonical), "/x/.." + canonical,
		strings.Replace(canonical, "/Retire", "//Retire", 1), strings.Replace(canonical, "Retire", "%52etire", 1),
		canonical + "?x=y", canonical + ";x",
	} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.server.URL()+path, strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			t.Fatal(err)
		}
		if err := resp.Body.Close(); err != nil {
			t.Fatal(err)
		}
		if resp.StatusCode != http.StatusNotFound && resp.StatusCode != http.StatusForbidden {
			t.Errorf("%s: %s", path, resp.Status)
		}
	}
	if reached {
		t.Error("the method was reached")
	}
}

func TestOnlyPostIsRouted(t *testing.T) {
	f := start(t, &backend{}, nil)
	resp, err := f.Client(t, "recovery",
		f.Service(t, "lifecycle")).Get(f.server.URL() + "/gpuaas.recovery.v1.InstanceService/RetireInstance")
	if err != nil {
		t.Fatal(err)
	}
	if err := resp.Body.Close(); err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != http.StatusMethodNotAllowed || resp.ProtoMajor != 2 {
		t.Errorf("%s over %s", resp.Status, resp.Proto)
	}
}

func TestPortsRefuseServicesTheyCannotGuard(t *testing.T) {
	tests := []struct {
		name  string
		path  string
		strip func(*port.Deps)
	}{
		{"no keys for persons", "/gpuaas.lifecycle.v1.WorkspaceService/", func(d *port.Deps) { d.Persons = nil }},
		{"no authenticator", "/gpuaas.readmodel.v1.QueryService/", func(d *port.Deps) { d.Authenticate = nil }},
		{"no such service", "/gpuaas.recovery.v1.Nothing/", func(*port.Deps) {}},
		{"a service without policies", "/grpc.health.v1.Health/", func(*port.Deps) {}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			authorities := rpctest.NewAuthorities(t)
			deps := port.Deps{Logger: slog.New(slog.DiscardHandler)}
			tt.strip(&deps)
			server, err := port.New(t.Context(), deps, port.Config{
				Name: "internal", Addr: "127.0.0.1:0", TLS: authorities.ServerTLS(t, "recovery"),
			})
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := server.Close(); err != nil {
					t.Error(err)
				}
			}()
			if err := server.Mount(tt.path, http.NotFoundHandler()); err == nil {
				t.Error("it was mounted")
			}
			if err := server.MountUnchecked("/gpuaas.recovery.v1.InstanceService/", http.NotFoundHandler()); err == nil {
				t.Error("a service of ours was mounted without its policies")
			}
		})
	}
}
