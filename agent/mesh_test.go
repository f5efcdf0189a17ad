package agent_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/mesh/agent"
	"github.com/gpuaas/mesh/agent/agenttest"
	"github.com/gpuaas/mesh/agent/backoff"
	"github.com/gpuaas/mesh/agent/identity/enrol"
	"github.com/gpuaas/mesh/agent/identity/envfile"
	"github.com/gpuaas/mesh/agent/session"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/cgroup"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/recoverykey"
	"github.com/gpuaas/mesh/internal/testkit"
)

// mesh is a control plane over loopback: an enrolment listener and a node API with real TLS.
type mesh struct {
	nodev1.UnimplementedNodeServiceServer
	t          *testing.T
	nodes      *agenttest.Authority
	services   *agenttest.Authority
	signer     envelope.Key
	private    ed25519.PrivateKey // of the key that an enrolment names
	api        string
	enrolURL   string
	nodeID     string
	grpcServer *grpc.Server

	mu          sync.Mutex
	instances   int
	instance    string
	issued      int64
	hellos      []*nodev1.Hello
	denial      *commonv1.Denial // instead of a Welcome
	lists       bool             // a RunList is announced; the test sends it
	observed    chan *nodev1.Observation
	enrolFail   error
	reportFails []commonv1.Reason // of the next requests that tell of a missing token, one each
	results     chan *nodev1.TaskResult
	frames      chan string
	host        *commonv1.HostFacts // as reported last
	diagnostics []*commonv1.Diagnostic
	keys        []*nodev1.TaskKey // of Welcome
	accepted    chan []string     // the ids of task keys that agents report
	streams     []grpc.BidiStreamingServer[nodev1.ConnectRequest, nodev1.ConnectResponse]
	enrols      []*recoveryv1.EnrollRequest
	refused     string               // a token that is too old
	lifts       bool                 // a recovery ends the denial
	policy      *commonv1.NodePolicy // of Welcome; nil: intervals alone
	answers     chan *nodev1.ProfileAnswer
	gives       func(*commonv1.Profile) // changes the profile of the reply to a recovery
	has         string                  // the fingerprint in answers to heartbeats
	beats       int                     // answered ones that had it
}

func newMesh(t *testing.T) *mesh {
	t.Helper()
	return newMeshOf(t, agenttest.TrustDomain)
}

// newMeshOf is newMesh with a trust domain of its own.
func newMeshOf(t *testing.T, domain string) *mesh {
	t.Helper()
	testkit.IO(t)
	m := &mesh{
		t: t, nodeID: ids.New(), results: make(chan *nodev1.TaskResult, 64), frames: make(chan string, 4096),
		observed: make(chan *nodev1.Observation, 4096), accepted: make(chan []string, 4096),
		answers: make(chan *nodev1.ProfileAnswer, 64),
	}
	var err error
	if m.nodes, err = agenttest.NewAuthority("nodes", time.Now()); err != nil {
		t.Fatal(err)
	}
	if m.services, err = agenttest.NewAuthority("services", time.Now()); err != nil {
		t.Fatal(err)
	}
	m.nodes.Domain = domain
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	m.signer, m.private = envelope.NewKey(private), private
	m.serveNodes()
	m.serveEnrolment()
	return m
}

func (m *mesh) pair(name string) tls.Certificate {
	m.t.Helper()
	pair, err := m.services.Pair(pki.ServiceID(m.nodes.Domain, name), time.Now().Add(-time.Hour),
		time.Now().Add(time.Hour))
	if err != nil {
		m.t.Fatal(err)
	}
	return *pair
}

func (m *mesh) listen() net.Listener {
	m.t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(m.t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		m.t.Fatal(err)
	}
	return listener
}

func (m *mesh) serveNodes() {
	pool := x509.NewCertPool()
	pool.AddCert(m.nodes.Cert)
	m.grpcServer = grpc.NewServer(grpc.Creds(credentials.NewTLS(&tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{m.pair("nodeapi")},
		ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool,
	})))
	nodev1.RegisterNodeServiceServer(m.grpcServer, m)
	m.api = m.serveAnother()
}

// serveAnother serves the node API at another address and returns it.
func (m *mesh) serveAnother() string {
	listener := m.listen()
	done := make(chan struct{})
	go func() { defer close(done); _ = m.grpcServer.Serve(listener) }()
	m.t.Cleanup(func() { m.grpcServer.Stop(); <-done })
	return listener.Addr().String()
}

func (m *mesh) serveEnrolment() {
	mux := http.NewServeMux()
	mux.Handle(recoveryv1connect.NewEnrollmentServiceHandler(m))
	server := &http.Server{
		Handler: mux, ReadHeaderTimeout: time.Second, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0),
		TLSConfig: &tls.Config{
			MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{m.pair("recovery")},
			NextProtos: []string{"h2", "http/1.1"},
		},
	}
	listener := m.listen()
	m.enrolURL = "https://" + listener.Addr().String()
	done := make(chan struct{})
	go func() { defer close(done); _ = server.ServeTLS(listener, "", "") }()
	m.t.Cleanup(func() { _ = server.Close(); <-done })
}

// Enroll makes a new instance of the node for each token of an operator. A recovery keeps the instance if it presents
// the join state that was issued last.
func (m *mesh) Enroll(_ context.Context, request *recoveryv1.EnrollRequest) (*recoveryv1.EnrollResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.enrols = append(m.enrols, request)
	if request.GetTokenMissing() != nil {
		if len(m.reportFails) > 0 {
			fail := m.reportFails[0]
			m.reportFails = m.reportFails[1:]
			return nil, fault.ToConnect(fault.New(fail, "", fault.RetryAfter(time.Millisecond)), "")
		}
		return nil, fault.ToConnect(fault.New(commonv1.Reason_REASON_RECOVERY_TOKEN_MISSING, ""), "")
	}
	recovers := envfile.IsRecoveryToken(request.GetToken())
	if recovers {
		if err := recoverykey.Verify(request.GetRecoveryPublicKey(), request.GetToken(), request.GetCsr(),
			request.GetRecoveryProof()); err != nil {
			m.t.Error(err)
		}
	}
	if m.refused != "" && request.GetToken() == m.refused {
		denial := fault.New(commonv1.Reason_REASON_TOKEN_EXPIRED, "", fault.RetryAfter(time.Millisecond))
		return nil, fault.ToConnect(denial, "")
	}
	if m.enrolFail != nil {
		return nil, fault.ToConnect(m.enrolFail, "")
	}
	chain, err := m.nodes.SignCSR(request.GetCsr(), m.nodeID, time.Now().Add(-time.Minute), time.Now().Add(time.Hour))
	if err != nil {
		return nil, err
	}
	if !recovers || int64(len(request.GetJoinState())) != m.issued {
		m.instances++
		m.instance, m.issued = ids.New(), 0
	}
	if recovers && m.lifts {
		m.denial = nil
	}
	profile := &commonv1.Profile{
		Name: "test", Fingerprint: "fp", ApiUrl: m.api, RecoveryUrl: m.enrolURL,
		CaBundlePem: m.services.PEM(), RecoveryCaBundlePem: m.services.PEM(),
	}
	if recovers && m.gives != nil {
		m.gives(profile)
	}
	return &recoveryv1.EnrollResponse{
		RecoveryToken: fmt.Sprintf("grt_%d", len(m.enrols)),
		NodeId:        m.nodeID, NodeInstanceId: m.instance, CertificateChainPem: chain, ServerTime: timestamppb.Now(),
		NodeName: "n1", Profile: profile,
		Policy:             &commonv1.NodePolicy{AutoRecovery: true},
		TaskSigningPubkeys: m.signer.ID() + ":" + base64.StdEncoding.EncodeToString(m.signer.Public()),
	}, nil
}

// turns lets a test and the server send over one stream.
type turns struct {
	grpc.BidiStreamingServer[nodev1.ConnectRequest, nodev1.ConnectResponse]
	mu sync.Mutex
}

func (s *turns) Send(frame *nodev1.ConnectResponse) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.BidiStreamingServer.Send(frame)
}

func (m *mesh) Connect(bare grpc.BidiStreamingServer[nodev1.ConnectRequest, nodev1.ConnectResponse]) error {
	stream := &turns{BidiStreamingServer: bare}
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	hello := first.GetHello()
	m.mu.Lock()
	m.hellos = append(m.hellos, hello)
	m.host = hello.GetHost()
	denial := m.denial
	if denial == nil && hello.GetNodeInstanceId() != m.instance {
		denial = fault.ToDenial(fault.New(commonv1.Reason_REASON_SERIAL_UNKNOWN, ""), "")
	}
	if denial == nil && int64(len(hello.GetJoinState())) != m.issued {
		m.t.Errorf("presented generation %d of %d", len(hello.GetJoinState()), m.issued)
	}
	if denial == nil {
		m.issued++
	}
	generation, lists, keys := m.issued, m.lists, m.keys
	policy := &commonv1.NodePolicy{HeartbeatInterval: durationpb.New(time.Second), AutoRecovery: true}
	if m.policy != nil {
		policy = m.policy
	}
	m.mu.Unlock()
	if denial != nil {
		return stream.Send(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_Denied{Denied: denial}})
	}
	if err := stream.Send(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_Welcome{Welcome: &nodev1.Welcome{
		Generation: generation, JoinState: make([]byte, generation), Nonce: ids.New(), SessionId: ids.New(),
		ServerTime: timestamppb.Now(), Policy: policy,
		TaskKeys: keys,
	}}}); err != nil {
		return err
	}
	ready, err := stream.Recv()
	if err != nil || ready.GetReady().GetGeneration() != generation {
		return fmt.Errorf("ready %v: %w", ready, err)
	}
	m.accepted <- ready.GetReady().GetTaskKeyIds()
	if err := stream.Send(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_Admitted{Admitted: &nodev1.Admitted{
		Generation: generation, ServerTime: timestamppb.Now(), RunListFollows: lists,
	}}}); err != nil {
		return err
	}
	m.mu.Lock()
	m.streams = append(m.streams, stream)
	m.mu.Unlock()
	m.frames <- "admitted"
	for {
		frame, err := stream.Recv()
		if err != nil {
			return nil //nolint:nilerr // the agent hung up
		}
		switch f := frame.GetFrame().(type) {
		case *nodev1.ConnectRequest_Diagnostic:
			m.mu.Lock()
			m.diagnostics = append(m.diagnostics, f.Diagnostic.GetDiagnostics()...)
			m.mu.Unlock()
		case *nodev1.ConnectRequest_Heartbeat:
			if changed := f.Heartbeat.GetChangedFacts(); changed != nil {
				m.mu.Lock()
				m.host = changed
				m.mu.Unlock()
			}
			err = stream.Send(
				&nodev1.ConnectResponse{
					Frame: &nodev1.ConnectResponse_HeartbeatAck{
						HeartbeatAck: &nodev1.HeartbeatAck{
							Sequence: f.Heartbeat.GetSequence(), ServerTime: timestamppb.Now(), ProfileFingerprint: m.profileSent(),
						},
					},
				},
			)
		case *nodev1.ConnectRequest_TaskKeysHeld:
			m.accepted <- f.TaskKeysHeld.GetKeyIds()
		case *nodev1.ConnectRequest_ProfileAnswer:
			m.answers <- f.ProfileAnswer
		case *nodev1.ConnectRequest_Observation:
			m.observed <- f.Observation
		case *nodev1.ConnectRequest_TaskDelivered:
			m.frames <- "delivered"
		case *nodev1.ConnectRequest_TaskResult:
			m.results <- f.TaskResult
			err = stream.Send(
				&nodev1.ConnectResponse{
					Frame: &nodev1.ConnectResponse_TaskResultAck{
						TaskResultAck: &nodev1.TaskResultAck{Tasks: []*nodev1.TaskRef{f.TaskResult.GetTask()}},
					},
				},
			)
		case *nodev1.ConnectRequest_Goodbye:
			m.frames <- "goodbye"
			return nil
		}
		if err != nil {
			return nil //nolint:nilerr // the agent hung up
		}
	}
}

func (m *mesh) wait(frame string) {
	m.t.Helper()
	for {
		select {
		case got := <-m.frames:
			if got == frame {
				return
			}
		case <-time.After(time.Minute):
			m.t.Fatalf("no %q in time", frame)
		}
	}
}

// probe offers a task that does nothing.
func (m *mesh) probe(nonce string) string {
	m.t.Helper()
	return m.request("", 0, commonv1.TaskType_TASK_TYPE_PROBE_NOOP, &nodev1.ProbeNoop{Nonce: nonce})
}

// request offers a task of a kind.
func (m *mesh) request(workspace string, op int64, kind commonv1.TaskType, of proto.Message) string {
	m.t.Helper()
	payload, err := proto.Marshal(of)
	if err != nil {
		m.t.Fatal(err)
	}
	return m.offer(envelope.Task{Type: names.Of(kind), WorkspaceID: workspace, Epoch: 1, OpSeq: op, Payload: payload})
}

// offer signs a task and sends it over the last stream.
func (m *mesh) offer(task envelope.Task) string {
	m.t.Helper()
	task.TaskID, task.NodeID, task.Attempt = ids.New(), m.nodeID, 1
	task.NotBefore, task.ExpiresAt = time.Now().Add(-time.Second), time.Now().Add(time.Minute)
	signed, err := envelope.Sign(m.signer, task)
	if err != nil {
		m.t.Fatal(err)
	}
	m.send(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_TaskOffer{TaskOffer: &nodev1.TaskOffer{
		Envelope: signed.Bytes, Signature: signed.Signature, KeyId: signed.KeyID, CorrelationId: ids.New(),
	}}})
	return task.TaskID
}

// send sends a frame over the last stream.
func (m *mesh) send(frame *nodev1.ConnectResponse) {
	m.t.Helper()
	m.mu.Lock()
	stream := m.streams[len(m.streams)-1]
	m.mu.Unlock()
	if err := stream.Send(frame); err != nil {
		m.t.Fatal(err)
	}
}

// waitObserved waits until the agent reports the one workload of a workspace in a phase.
func (m *mesh) waitObserved(workspace string, phase nodev1.WorkloadPhase) {
	m.t.Helper()
	deadline := time.After(time.Minute)
	for {
		select {
		case o := <-m.observed:
			if o.GetWorkspaceId() == workspace && len(o.GetWorkloads()) == 1 && o.GetWorkloads()[0].GetPhase() == phase {
				return
			}
		case <-deadline:
			m.t.Fatalf("not reported as %v in time", phase)
		}
	}
}

// cut ends the last session with an error after which the agent reconnects by itself.
func (m *mesh) cut() {
	m.t.Helper()
	denied := fault.ToDenial(fault.New(commonv1.Reason_REASON_UNAVAILABLE, ""), "")
	m.send(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_Denied{Denied: denied}})
}

func (m *mesh) bundle(token string) string {
	m.t.Helper()
	dir := m.t.TempDir()
	for name, content := range map[string]string{
		"node-agent.env":         "GPUAAS_RECOVERY_API_URL=" + m.enrolURL + "\nGPUAAS_ENROLLMENT_TOKEN=" + token + "\n",
		"ca-bundle.crt":          string(m.services.PEM()),
		"recovery-ca-bundle.crt": string(m.services.PEM()),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			m.t.Fatal(err)
		}
	}
	return dir
}

func config(root string) agent.Config {
	fast := backoff.Policy{Base: 20 * time.Millisecond, Cap: 200 * time.Millisecond}
	return agent.Config{
		EtcDir: filepath.Join(root, "etc"), StateDir: filepath.Join(root, "state"), UIDDir: filepath.Join(root, "uids"),
		SimulatedGPUs: 2, SlowRetry: 200 * time.Millisecond, ObserveLeast: 10 * time.Millisecond, Version: "test",
		Session: session.Config{Backoff: fast, SlowRetry: 200 * time.Millisecond},
		Enrol:   enrol.Config{Backoff: fast, SlowRetry: 200 * time.Millisecond},
	}
}

func open(t *testing.T, cfg agent.Config) *agent.Agent {
	t.Helper()
	return openLogging(t, cfg, slog.NewTextHandler(t.Output(), nil))
}

func openLogging(t *testing.T, cfg agent.Config, to slog.Handler) *agent.Agent {
	t.Helper()
	t.Cleanup(func() {
		if err := cgroup.Remove(cfg.StateDir); err != nil {
			t.Log(err) // a workload that the test leaves running
		}
	})
	a, err := agent.New(t.Context(), agent.Deps{Logger: slog.New(to)}, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// run starts an agent, and returns a function that ends it and a channel with its error.
func run(t *testing.T, a *agent.Agent) (func() error, <-chan error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	return func() error { cancel(); return <-done }, done
}
