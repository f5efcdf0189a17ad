package readmodel_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/common/v1/commonv1connect"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1/lifecyclev1connect"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1/readmodelv1connect"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/rpc/assertion"
	"github.com/gpuaas/mesh/internal/rpc/port"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel"
	"github.com/gpuaas/mesh/services/readmodel/gateway/people"
	"github.com/gpuaas/mesh/services/readmodel/project"
	"github.com/gpuaas/mesh/services/readmodel/project/projecttest"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// healthy is a service that reports itself and the parts of these names as healthy.
type healthy []string

func (h healthy) GetHealth(context.Context, *commonv1.GetHealthRequest) (*commonv1.GetHealthResponse, error) {
	part := func(name string) *commonv1.Part {
		return &commonv1.Part{
			Name: name, State: commonv1.PartState_PART_STATE_OK, Since: timestamppb.Now(),
			ObservedAt: timestamppb.Now(), Required: name == "database",
		}
	}
	parts := []*commonv1.Part{part("database")}
	for _, name := range h {
		parts = append(parts, part(name))
	}
	return &commonv1.GetHealthResponse{Parts: parts}, nil
}

// owners are fakes of lifecycle and recovery: they verify the person as the real services do, and record their
// requests.
type owners struct {
	lifecyclev1connect.UnimplementedWorkspaceServiceHandler
	lifecyclev1connect.UnimplementedTaskServiceHandler
	lifecyclev1connect.UnimplementedOutputServiceHandler
	lifecyclev1connect.UnimplementedGateServiceHandler
	lifecyclev1connect.UnimplementedDiagnosticsServiceHandler
	recoveryv1connect.UnimplementedIdentityServiceHandler
	recoveryv1connect.UnimplementedPolicyServiceHandler
	recoveryv1connect.UnimplementedRollbackServiceHandler

	mu    sync.Mutex
	asked []asked
	fail  error
}

type asked struct {
	person  rpc.Person
	message proto.Message
}

func (o *owners) note(ctx context.Context, m proto.Message) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	p, _ := rpc.PersonFrom(ctx)
	o.asked = append(o.asked, asked{person: p, message: m})
	return o.fail
}

func (o *owners) take() []asked {
	o.mu.Lock()
	defer o.mu.Unlock()
	out := o.asked
	o.asked = nil
	return out
}

func (o *owners) refuse(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.fail = err
}

func (o *owners) CreateTenant(ctx context.Context,
	r *lifecyclev1.CreateTenantRequest,
) (*lifecyclev1.CreateTenantResponse, error) {
	return &lifecyclev1.CreateTenantResponse{Tenant: &lifecyclev1.Tenant{Name: r.GetName()}, Pos: "pos"}, o.note(ctx, r)
}

func (o *owners) RequestOperation(ctx context.Context,
	r *lifecyclev1.RequestOperationRequest,
) (*lifecyclev1.RequestOperationResponse, error) {
	return &lifecyclev1.RequestOperationResponse{Operation: &lifecyclev1.Operation{
		Kind:        r.GetKind(),
		WorkspaceId: r.GetWorkspaceId(), Pos: "pos",
	}}, o.note(ctx, r)
}

func (o *owners) ReadOutput(ctx context.Context, r *lifecyclev1.ReadOutputRequest) (*lifecyclev1.ReadOutputResponse,
	error,
) {
	return &lifecyclev1.ReadOutputResponse{
		Workload: "main",
		Output:   &nodev1.WorkloadOutput{Run: "r", Data: []byte("READCANARY")},
	}, o.note(ctx, r)
}

func (o *owners) GetActions(ctx context.Context, r *lifecyclev1.GetActionsRequest) (*lifecyclev1.GetActionsResponse,
	error,
) {
	return &lifecyclev1.GetActionsResponse{
		Actions: []*lifecyclev1.ActionOption{
			{Kind: commonv1.OperationKind_OPERATION_KIND_CANCEL, Possible: true},
			{
				Kind: commonv1.OperationKind_OPERATION_KIND_RECREATE, Possible: true,
				Consequence: "counts what it has on " + hiddenNode + " as ended",
			},
			{
				Kind: commonv1.OperationKind_OPERATION_KIND_RETRY, Reason: commonv1.Reason_REASON_HOST_RUNTIME_DRIFT,
				Unmet: []string{"machine " + hiddenNode + " is cordoned by verdict:host_runtime_drift: " + hiddenText},
			},
		},
	}, o.note(ctx, r)
}

func (o *owners) EnqueueProbe(ctx context.Context,
	r *lifecyclev1.EnqueueProbeRequest,
) (*lifecyclev1.EnqueueProbeResponse, error) {
	return &lifecyclev1.EnqueueProbeResponse{Task: &lifecyclev1.Task{NodeId: r.GetNodeId()}}, o.note(ctx, r)
}

func (o *owners) ChangeTask(ctx context.Context, r *lifecyclev1.ChangeTaskRequest) (*lifecyclev1.ChangeTaskResponse,
	error,
) {
	return &lifecyclev1.ChangeTaskResponse{Task: &lifecyclev1.Task{TaskId: r.GetTaskId()}}, o.note(ctx, r)
}

func (o *owners) SetCordon(ctx context.Context, r *lifecyclev1.SetCordonRequest) (*lifecyclev1.SetCordonResponse,
	error,
) {
	return &lifecyclev1.SetCordonResponse{Gate: &lifecyclev1.NodeGate{NodeId: r.GetNodeId(), Cordoned: r.GetCordoned()}},
		o.note(ctx, r)
}

func (o *owners) IssueBootstrap(ctx context.Context,
	r *recoveryv1.IssueBootstrapRequest,
) (*recoveryv1.IssueBootstrapResponse, error) {
	return &recoveryv1.IssueBootstrapResponse{NodeId: r.GetName(), Token: "gbt"}, o.note(ctx, r)
}

func (o *owners) ChangeIdentity(ctx context.Context,
	r *recoveryv1.ChangeIdentityRequest,
) (*recoveryv1.ChangeIdentityResponse, error) {
	return &recoveryv1.ChangeIdentityResponse{Node: &recoveryv1.NodeIdentity{NodeId: r.GetNodeId()}}, o.note(ctx, r)
}

func (o *owners) GetPolicy(ctx context.Context, r *recoveryv1.GetPolicyRequest) (*recoveryv1.GetPolicyResponse, error) {
	return &recoveryv1.GetPolicyResponse{Keys: []*recoveryv1.PolicyKey{{Key: "saga.retry_limit", Value: "3"}}},
		o.note(ctx, r)
}

func (o *owners) SetPolicy(ctx context.Context, r *recoveryv1.SetPolicyRequest) (*recoveryv1.SetPolicyResponse, error) {
	return &recoveryv1.SetPolicyResponse{Key: &recoveryv1.PolicyKey{Key: r.GetKey(), Value: r.GetValue()}}, o.note(ctx, r)
}

// kit is a running replica over a synthetic mesh.
type kit struct {
	*projecttest.World

	t           *testing.T
	authorities *rpctest.Authorities
	owners      *owners
	service     *readmodel.Service
	config      readmodel.Config
}

// Append writes as the services do: the event is numbered at once, and the replica is notified of it. The replica does
// not wait for its own poll, which is rare while it listens.
func (k *kit) Append(m proto.Message) string { return k.Put(m) }

func newKit(t *testing.T) *kit {
	t.Helper()
	testkit.IO(t)
	k := &kit{World: projecttest.NewWorld(t), t: t, authorities: rpctest.NewAuthorities(t), owners: &owners{}}
	k.config = k.configure()
	k.service = k.start(k.config)
	k.awaitProjected()
	return k
}

// awaitProjected waits until all numbered events are projected.
func (k *kit) awaitProjected() {
	k.t.Helper()
	pool := k.DB.Pool(pg.RoleReadmodel)
	testkit.Eventually(k.t, testkit.Patience, func() error {
		cursor, err := project.Position(testkit.Context(k.t), pool)
		if err != nil {
			return err
		}
		horizon, err := events.Horizon(testkit.Context(k.t), pool)
		if err == nil && cursor < horizon {
			err = fmt.Errorf("projected %d of %d", cursor, horizon)
		}
		return err
	})
}

func (k *kit) check(err error) {
	k.t.Helper()
	if err != nil {
		k.t.Fatal(err)
	}
}

func (k *kit) configure() readmodel.Config {
	k.t.Helper()
	dir := k.t.TempDir()
	secret := func(name, text string) config.SecretFile {
		path := filepath.Join(dir, name)
		k.check(os.WriteFile(path, []byte(text+"\n"), 0o600))
		return config.SecretFile(path)
	}
	k.check(k.authorities.Services.IssueToDir("readmodel", dir, time.Hour))
	cfg := readmodel.Default()
	cfg.TrustDomain = rpctest.TrustDomain
	cfg.DatabaseURLFile = secret("database", k.DB.URL(pg.RoleReadmodel))
	cfg.SequencerURLFile = secret("sequencer", k.DB.URL(pg.RoleSequencer))
	identity := filepath.Join(dir, pki.IdentityFile)
	cfg.TLS.CertFile, cfg.TLS.KeyFile, cfg.TLS.CAFile = identity, identity, filepath.Join(dir, pki.BundleFile)
	cfg.AssertionKeyFile = filepath.Join(dir, "assertion.key")
	cfg.PeopleHosts = []string{"localhost", "127.0.0.1"}
	key, err := pki.LoadOrCreateSigningKey(cfg.AssertionKeyFile)
	k.check(err)
	keys, err := assertion.NewSigner(key, nil).KeySet()
	k.check(err)
	cfg.Peers.Lifecycle = k.owner("lifecycle", keys, func(s *port.Server) {
		k.mount(s)(lifecyclev1connect.NewWorkspaceServiceHandler(k.owners, s.HandlerOptions()...))
		k.mount(s)(lifecyclev1connect.NewOutputServiceHandler(k.owners, s.HandlerOptions()...))
		k.mount(s)(lifecyclev1connect.NewTaskServiceHandler(k.owners, s.HandlerOptions()...))
		k.mount(s)(lifecyclev1connect.NewGateServiceHandler(k.owners, s.HandlerOptions()...))
		k.mount(s)(lifecyclev1connect.NewDiagnosticsServiceHandler(k.owners, s.HandlerOptions()...))
		k.mount(s)(commonv1connect.NewHealthServiceHandler(healthy{"lock_store"}, s.HandlerOptions()...))
	})
	cfg.Peers.Recovery = k.owner("recovery", keys, func(s *port.Server) {
		k.mount(s)(recoveryv1connect.NewIdentityServiceHandler(k.owners, s.HandlerOptions()...))
		k.mount(s)(recoveryv1connect.NewPolicyServiceHandler(k.owners, s.HandlerOptions()...))
		k.mount(s)(recoveryv1connect.NewWatchdogServiceHandler(k.owners, s.HandlerOptions()...))
		k.mount(s)(recoveryv1connect.NewRollbackServiceHandler(k.owners, s.HandlerOptions()...))
		m := machines{owners: k.owners}
		k.mount(s)(recoveryv1connect.NewTokenServiceHandler(m, s.HandlerOptions()...))
		k.mount(s)(recoveryv1connect.NewProfileServiceHandler(m, s.HandlerOptions()...))
		k.mount(s)(recoveryv1connect.NewTrustServiceHandler(m, s.HandlerOptions()...))
		k.mount(s)(recoveryv1connect.NewActionServiceHandler(m, s.HandlerOptions()...))
		k.mount(s)(recoveryv1connect.NewBundleServiceHandler(m, s.HandlerOptions()...))
		k.mount(s)(recoveryv1connect.NewAuthorityServiceHandler(m, s.HandlerOptions()...))
		k.mount(s)(recoveryv1connect.NewHostFactsServiceHandler(m, s.HandlerOptions()...))
		k.mount(s)(recoveryv1connect.NewDiagnosticsServiceHandler(m, s.HandlerOptions()...))
		k.mount(s)(commonv1connect.NewHealthServiceHandler(
			healthy{"ca", "ingress_trust", "configured_profile"}, s.HandlerOptions()...))
	})
	return cfg
}

func (k *kit) mount(s *port.Server) func(string, http.Handler) {
	return func(path string, h http.Handler) {
		k.t.Helper()
		k.check(s.Mount(path, h))
	}
}

func (k *kit) owner(name string, keys *pki.KeySet, mount func(*port.Server)) string {
	k.t.Helper()
	server, err := port.New(k.t.Context(), port.Deps{
		Logger: testkit.Logger(k.t), Persons: assertion.NewVerifier(keys, nil),
	}, port.Config{Name: "internal", Addr: "127.0.0.1:0", TLS: k.authorities.ServerTLS(k.t, name)})
	k.check(err)
	mount(server)
	rpctest.Run(k.t, server)
	return server.Addr().String()
}

func (k *kit) start(cfg readmodel.Config) *readmodel.Service {
	k.t.Helper()
	return k.startLogging(cfg, testkit.Logger(k.t))
}

func (k *kit) startLogging(cfg readmodel.Config, logger *slog.Logger) *readmodel.Service {
	k.t.Helper()
	registry, err := obs.NewRegistry()
	k.check(err)
	s, err := readmodel.New(k.t.Context(), readmodel.Deps{Logger: logger, Registry: registry}, cfg)
	k.check(err)
	ctx, cancel := context.WithCancel(k.t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	k.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			k.t.Errorf("run: %v", err)
		}
	})
	return s
}

// revoke ends the session of an id.
func (k *kit) revoke(id string) {
	k.t.Helper()
	tag, err := k.DB.Pool(pg.RoleReadmodel).Exec(testkit.Context(k.t), `
		UPDATE readmodel.person_session SET revoked_at = mesh.clock(), revoked_by = 'admin'
		WHERE session_id = $1::uuid AND revoked_at IS NULL`, id)
	if k.check(err); tag.RowsAffected() != 1 {
		k.t.Fatalf("revoked %d sessions", tag.RowsAffected())
	}
}

func (k *kit) url() string { return "https://" + k.service.PeopleAddr() }

// token issues a session.
func (k *kit) token(tenantID string, roles ...string) string {
	k.t.Helper()
	return k.tokenOf("person@"+tenantID, tenantID, roles...)
}

// tokenOf issues a session to a person with another subject.
func (k *kit) tokenOf(subject, tenantID string, roles ...string) string {
	k.t.Helper()
	token, err := people.IssueSession(testkit.Context(k.t), k.DB.Pool(pg.RoleReadmodel), subject, tenantID, roles,
		time.Hour)
	k.check(err)
	return token
}

// bearer adds a token to every request.
type bearer struct {
	token string
	inner http.RoundTripper
}

func (b bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	if b.token != "" {
		r.Header.Set("Authorization", "Bearer "+b.token)
	}
	return b.inner.RoundTrip(r)
}

// http is a person's client, over HTTP/2 or HTTP/1.1.
func (k *kit) http(token string, two bool) *http.Client {
	k.t.Helper()
	roots := x509.NewCertPool()
	for _, c := range k.authorities.Services.Roots() {
		roots.AddCert(c)
	}
	protocols := new(http.Protocols)
	protocols.SetHTTP1(!two)
	protocols.SetHTTP2(two)
	transport := &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS13},
		Protocols:       protocols,
	}
	k.t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: bearer{token: token, inner: transport}}
}

func (k *kit) query(token string, opts ...connect.ClientOption) readmodelv1connect.QueryServiceClient {
	k.t.Helper()
	return readmodelv1connect.NewQueryServiceClient(k.http(token, true), k.url(), opts...)
}

func (k *kit) command(token string) readmodelv1connect.CommandServiceClient {
	k.t.Helper()
	return readmodelv1connect.NewCommandServiceClient(k.http(token, true), k.url())
}

// answer is the answer to a raw call.
type answer struct {
	Status int
	Body   string // without the values that are random for each request
}

// without returns the answer without the text that the request itself named, which a refusal repeats.
func (a answer) without(asked string) answer {
	if asked != "" {
		a.Body = strings.ReplaceAll(a.Body, asked, "")
	}
	return a
}

// post calls a method with JSON over HTTP/1.1, as any script would.
func (k *kit) post(client *http.Client, procedure string, m proto.Message) answer {
	k.t.Helper()
	body, err := protojson.Marshal(m)
	k.check(err)
	req, err := http.NewRequestWithContext(testkit.Context(k.t), http.MethodPost, k.url()+procedure, bytes.NewReader(body))
	k.check(err)
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	k.check(err)
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	k.check(err)
	return answer{Status: resp.StatusCode, Body: k.stable(raw)}
}

// stable replaces the correlation id in an error's details.
func (k *kit) stable(raw []byte) string {
	k.t.Helper()
	var wire struct {
		Code    string `json:"code"`
		Message string `json:"message"`
		Details []struct {
			Value string `json:"value"`
		} `json:"details"`
	}
	if json.Unmarshal(raw, &wire) != nil || wire.Code == "" {
		return string(raw)
	}
	out := []string{wire.Code + ": " + wire.Message}
	for _, d := range wire.Details {
		value, err := base64.RawStdEncoding.DecodeString(d.Value)
		k.check(err)
		denial := &commonv1.Denial{}
		k.check(proto.Unmarshal(value, denial))
		denial.CorrelationId = ""
		text, err := proto.MarshalOptions{Deterministic: true}.Marshal(denial)
		k.check(err)
		out = append(out, denial.GetReason().String(), string(text))
	}
	return strings.Join(out, " ")
}
