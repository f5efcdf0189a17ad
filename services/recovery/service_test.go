package recovery_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1/lifecyclev1connect"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/joinstate"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/recoverykey"
	"github.com/gpuaas/mesh/internal/replicas"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/rpc/assertion"
	"github.com/gpuaas/mesh/internal/rpc/calls"
	"github.com/gpuaas/mesh/internal/rpc/port"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// gates is a fake of lifecycle that handles fences alone.
type gates struct {
	lifecyclev1connect.UnimplementedGateServiceHandler

	mu    sync.Mutex
	calls []*lifecyclev1.ApplyFenceRequest
}

func (g *gates) ApplyFence(_ context.Context, req *lifecyclev1.ApplyFenceRequest) (*lifecyclev1.ApplyFenceResponse,
	error,
) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.calls = append(g.calls, req)
	return &lifecyclev1.ApplyFenceResponse{FenceEpoch: req.GetFenceEpoch(), Admitted: req.GetAdmitted()}, nil
}

func (g *gates) saw(nodeID string, fence int64, admitted bool) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.ContainsFunc(g.calls, func(c *lifecyclev1.ApplyFenceRequest) bool {
		return c.GetNodeId() == nodeID && c.GetFenceEpoch() == fence && c.GetAdmitted() == admitted
	})
}

// mesh is one replica of recovery with everything around it real but lifecycle's decisions.
type mesh struct {
	t           *testing.T
	ctx         context.Context
	db          *testkit.Database
	authorities *rpctest.Authorities
	asserter    *assertion.Signer
	gates       *gates
	cfg         recovery.Config
	service     *recovery.Service
	registry    *obs.Registry
}

func write(t *testing.T, path, text string) string {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func start(t *testing.T, change ...func(*recovery.Config)) *mesh {
	t.Helper()
	testkit.IO(t)
	m := &mesh{t: t, ctx: testkit.Context(t), db: testkit.DB(t), authorities: rpctest.NewAuthorities(t), gates: &gates{}}
	lifecycle, err := port.New(m.ctx,
		port.Deps{Logger: testkit.Logger(t), Persons: assertion.NewVerifier(nil, nil)},
		port.Config{Name: "internal", Addr: "127.0.0.1:0", TLS: m.authorities.ServerTLS(t, "lifecycle")})
	if err != nil {
		t.Fatal(err)
	}
	if err := lifecycle.Mount(lifecyclev1connect.NewGateServiceHandler(m.gates,
		lifecycle.HandlerOptions()...)); err != nil {
		t.Fatal(err)
	}
	rpctest.Run(t, lifecycle)

	dir := t.TempDir()
	certs := filepath.Join(dir, "recovery")
	if err := m.authorities.Services.IssueToDir("recovery", certs, time.Hour); err != nil {
		t.Fatal(err)
	}
	roots := write(t, filepath.Join(dir, "services.pem"), string(m.authorities.ServiceRoots.PEM()))
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	m.asserter = assertion.NewSigner(key, nil)
	set, err := m.asserter.KeySet()
	if err != nil {
		t.Fatal(err)
	}
	cfg := recovery.Default()
	cfg.TrustDomain = rpctest.TrustDomain
	cfg.DatabaseURLFile = config.SecretFile(write(t, filepath.Join(dir, "db"), m.db.URL(pg.RoleRecovery)))
	cfg.SequencerURLFile = config.SecretFile(write(t, filepath.Join(dir, "seq"), m.db.URL(pg.RoleSequencer)))
	cfg.TLS.CertFile = filepath.Join(certs, pki.IdentityFile)
	cfg.TLS.KeyFile = cfg.TLS.CertFile
	cfg.TLS.CAFile = roots
	cfg.CADir = filepath.Join(dir, "ca")
	cfg.JoinStateKeys = filepath.Join(dir, "join")
	cfg.Profile = recovery.Profile{Name: "test", APIURL: "127.0.0.1:1", RecoveryURL: "https://127.0.0.1:2", CAFile: roots}
	cfg.TaskSigningPubkeysFile = write(t, filepath.Join(dir, "tasks.pub"), set.String()+"\n")
	cfg.AssertionPubkeysFile = write(t, filepath.Join(dir, "assert.pub"), set.String()+"\n")
	cfg.Peers.Lifecycle = lifecycle.Addr().String()
	for _, c := range change {
		c(&cfg)
	}
	m.cfg = cfg
	registry, err := obs.NewRegistry()
	if err != nil {
		t.Fatal(err)
	}
	m.registry = registry
	if m.service, err = recovery.New(m.ctx, recovery.Deps{Logger: testkit.Logger(t), Registry: registry},
		cfg); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(m.ctx)
	done := make(chan error, 1)
	go func() { done <- m.service.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("recovery: %v", err)
		}
	})
	return m
}

func (m *mesh) client(as string) (*http.Client, string) {
	return m.authorities.Client(m.t, "recovery", m.authorities.Service(m.t, as)), "https://" + m.service.Addr()
}

func (m *mesh) asPerson(roles ...string) context.Context {
	return rpc.WithPerson(m.ctx, rpc.Person{Subject: "ada", Roles: roles})
}

func TestFromBundleToFence(t *testing.T) {
	m := start(t)
	console, url := m.client("readmodel")
	opts := calls.Options(calls.Config{Asserter: m.asserter})
	people := recoveryv1connect.NewIdentityServiceClient(console, url, opts...)
	bundle, err := people.IssueBootstrap(m.asPerson("operator"), &recoveryv1.IssueBootstrapRequest{Name: "node-1"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := people.IssueBootstrap(m.ctx, &recoveryv1.IssueBootstrapRequest{Name: "node-2"}); !fault.Has(err,
		commonv1.Reason_REASON_ASSERTION_INVALID) {
		t.Fatalf("without a person: %v", err)
	}

	// The machine: server TLS only.
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	csr, err := pki.NewAnonymousCSR(key)
	if err != nil {
		t.Fatal(err)
	}
	machine := m.authorities.Client(t, "recovery", nil)
	enrolment := recoveryv1connect.NewEnrollmentServiceClient(machine, "https://"+m.service.EnrollAddr(),
		calls.Options(calls.Config{})...)
	enrolled, err := enrolment.Enroll(m.ctx, &recoveryv1.EnrollRequest{Token: bundle.GetToken(), Csr: csr})
	if err != nil {
		t.Fatal(err)
	}
	if enrolled.GetProfile().GetFingerprint() == "" || enrolled.GetTaskSigningPubkeys() == "" ||
		enrolled.GetNodeId() != bundle.GetNodeId() {
		t.Fatalf("%v", enrolled)
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		if !m.gates.saw(bundle.GetNodeId(), 1, true) {
			return fmt.Errorf("lifecycle was not told of the node")
		}
		return nil
	})

	// nodeapi: watch, open, confirm.
	replica, _ := m.client("nodeapi")
	sessions := recoveryv1connect.NewSessionServiceClient(replica, url, calls.Options(calls.Config{})...)
	view := watch(t, m, sessions)
	certs, err := pki.DecodeCertificates(enrolled.GetCertificateChainPem())
	if err != nil {
		t.Fatal(err)
	}
	serial := pki.SerialString(certs[0].SerialNumber)
	open := &recoveryv1.OpenSession{
		SessionId: ids.New(), NodeId: enrolled.GetNodeId(), NodeInstanceId: enrolled.GetNodeInstanceId(), Serial: serial,
		ReplacesNonce: "n0",
	}
	opened, err := sessions.OpenSessions(m.ctx, &recoveryv1.OpenSessionsRequest{Sessions: []*recoveryv1.OpenSession{open}})
	if err != nil {
		t.Fatal(err)
	}
	welcome := opened.GetResults()[0]
	if welcome.GetVerdict() != recoveryv1.OpenVerdict_OPEN_VERDICT_WELCOME ||
		opened.GetProfileFingerprint() != enrolled.GetProfile().GetFingerprint() {
		t.Fatalf("%v", opened)
	}
	keys, err := joinstate.LoadOrCreateKeys(m.cfg.JoinStateKeys)
	if err != nil {
		t.Fatal(err)
	}
	if state, err := keys.Verify(welcome.GetJoinState()); err != nil || state.Generation != 1 || state.Serial != serial {
		t.Fatalf("%+v %v", state, err)
	}
	confirmed, err := sessions.ConfirmSessions(m.ctx,
		&recoveryv1.ConfirmSessionsRequest{Sessions: []*recoveryv1.ConfirmSession{{
			SessionId: open.GetSessionId(), NodeId: open.GetNodeId(), NodeInstanceId: open.GetNodeInstanceId(), Generation: 1,
			Serial: serial,
		}}})
	if err != nil || !confirmed.GetResults()[0].GetAdmitted() {
		t.Fatalf("%v %v", confirmed, err)
	}
	view.until(func(n *recoveryv1.NodeAuthority) bool {
		return n.GetConfirmed() == 1 && n.GetCurrentSerial() == serial && n.GetConfirmedSessionId() == open.GetSessionId() &&
			n.GetReplacedNonce() == "n0"
	})
	renewKey, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	if csr, err = pki.NewAnonymousCSR(renewKey); err != nil {
		t.Fatal(err)
	}
	recoveryKey, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	public, err := recoverykey.Public(recoveryKey)
	if err != nil {
		t.Fatal(err)
	}
	renewed, err := sessions.RenewCertificate(m.ctx, &recoveryv1.RenewCertificateRequest{
		NodeId: open.GetNodeId(), NodeInstanceId: open.GetNodeInstanceId(), SessionId: open.GetSessionId(), Serial: serial,
		Csr: csr, RecoveryPublicKey: public,
	})
	if err != nil || renewed.GetSerial() == serial || !strings.HasPrefix(renewed.GetRecoveryToken(), "grt_") {
		t.Fatalf("%v %v", renewed, err)
	}

	// A person fences the node; lifecycle is notified, and the view has the fence.
	changed, err := people.ChangeIdentity(m.asPerson("security"), &recoveryv1.ChangeIdentityRequest{
		NodeId: open.GetNodeId(), Verb: recoveryv1.IdentityVerb_IDENTITY_VERB_FENCE, Reason: "suspected",
	})
	if err != nil || !changed.GetNode().GetFencing() || changed.GetPos() == "" {
		t.Fatalf("%v %v", changed, err)
	}
	view.until(func(n *recoveryv1.NodeAuthority) bool {
		return n.GetState() == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED && n.GetFenceEpoch() == 2
	})
	testkit.Eventually(t, testkit.Patience, func() error {
		if !m.gates.saw(open.GetNodeId(), 2, false) {
			return fmt.Errorf("lifecycle was not told of the fence")
		}
		return nil
	})
	if _, err := people.ChangeIdentity(m.asPerson("operator"), &recoveryv1.ChangeIdentityRequest{
		NodeId: open.GetNodeId(), Verb: recoveryv1.IdentityVerb_IDENTITY_VERB_REACTIVATE, Reason: "please",
	}); !fault.Has(err, commonv1.Reason_REASON_PERMISSION_DENIED) {
		t.Fatalf("an operator lifts a fence: %v", err)
	}
	view.measure()
}

// viewer is nodeapi's side of WatchAuthority.
type viewer struct {
	t      *testing.T
	frames chan *recoveryv1.WatchAuthorityResponse
	send   func(*recoveryv1.WatchAuthorityRequest) error
}

func watch(t *testing.T, m *mesh, sessions recoveryv1connect.SessionServiceClient) *viewer {
	t.Helper()
	ctx, cancel := context.WithCancel(m.ctx)
	stream, err := sessions.WatchAuthority(ctx)
	if err != nil {
		t.Fatal(err)
	}
	v := &viewer{t: t, frames: make(chan *recoveryv1.WatchAuthorityResponse, 64), send: stream.Send}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			f, err := stream.Receive()
			if err != nil {
				return
			}
			v.frames <- f
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	if err := stream.Send(&recoveryv1.WatchAuthorityRequest{Frame: &recoveryv1.WatchAuthorityRequest_Subscribe{
		Subscribe: &recoveryv1.AuthoritySubscribe{ReplicaId: ids.New()},
	}}); err != nil {
		t.Fatal(err)
	}
	for v.next().GetSnapshotEnd() == nil {
	}
	return v
}

func (v *viewer) next() *recoveryv1.WatchAuthorityResponse {
	v.t.Helper()
	select {
	case f := <-v.frames:
		return f
	case <-time.After(time.Minute):
		v.t.Fatal("no frame came")
		return nil
	}
}

func (v *viewer) until(ok func(*recoveryv1.NodeAuthority) bool) {
	v.t.Helper()
	for {
		if d := v.next().GetDelta(); d != nil && ok(d) {
			return
		}
	}
}

// measure prints what a ping costs: a loopback round trip and one poll.
func (v *viewer) measure() {
	v.t.Helper()
	var took []time.Duration
	for i := range int64(50) {
		began := time.Now()
		if err := v.send(
			&recoveryv1.WatchAuthorityRequest{
				Frame: &recoveryv1.WatchAuthorityRequest_Ping{Ping: &recoveryv1.AuthorityPing{PingId: i}},
			},
		); err != nil {
			v.t.Fatal(err)
		}
		for v.next().GetPong().GetPingId() != i {
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	v.t.Logf("ping p50 %s, worst %s", took[len(took)/2], took[len(took)-1])
}

func TestPolicyService(t *testing.T) {
	m := start(t)
	console, url := m.client("readmodel")
	admin := recoveryv1connect.NewPolicyServiceClient(console, url,
		calls.Options(calls.Config{Asserter: m.asserter})...)
	list, err := admin.GetPolicy(m.asPerson("viewer"), &recoveryv1.GetPolicyRequest{})
	if err != nil || len(list.GetKeys()) != len(policy.Keys()) {
		t.Fatalf("%d keys, %v", len(list.GetKeys()), err)
	}
	set := func(key, value, reason string, ack bool) (*recoveryv1.SetPolicyResponse, error) {
		return admin.SetPolicy(m.asPerson("operator"),
			&recoveryv1.SetPolicyRequest{Key: key, Value: value, Reason: reason, AcknowledgeWeakening: ack})
	}
	const key = "node.heartbeat_stale_after_seconds"
	if got, err := set(key, "60", "", false); err != nil || got.GetKey().GetValue() != "60" ||
		!got.GetKey().GetOverridden() || got.GetPos() == "" {
		t.Fatalf("%v %v", got, err)
	}
	for _, tt := range []struct {
		name, key, value string
		want             commonv1.Reason
	}{
		{"unknown key", "node.nothing", "1", commonv1.Reason_REASON_POLICY_KEY_UNKNOWN},
		{"outside", key, "100000", commonv1.Reason_REASON_POLICY_VALUE_REFUSED},
		{"weaker", key, "600", commonv1.Reason_REASON_POLICY_WEAKENING_UNACKNOWLEDGED},
		{
			"a certificate too long for the token", "node.certificate_ttl_seconds", "40000",
			commonv1.Reason_REASON_POLICY_VALUE_REFUSED,
		},
	} {
		if _, err := set(tt.key, tt.value, "", false); !fault.Has(err, tt.want) {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
	if got, err := set(key, "600", "a long maintenance", true); err != nil ||
		got.GetKey().GetReason() != "a long maintenance" || got.GetKey().GetUpdatedBy() != "ada" {
		t.Fatalf("%v %v", got, err)
	}
	var n int
	if err := m.db.Pool(pg.RoleRecovery).QueryRow(m.ctx,
		`SELECT max(aggregate_version) FROM events.event WHERE kind = 'policy.changed'`).Scan(&n); err != nil || n != 2 {
		t.Fatalf("%d changes in the log, %v", n, err)
	}
}

func TestRefusesWhoMayNotCall(t *testing.T) {
	m := start(t)
	refused := rpctest.RefusesEveryMethod(t, rpctest.Target{
		URL: "https://" + m.service.Addr(), Service: "recovery", Authorities: m.authorities,
		Services: []string{
			recoveryv1connect.SessionServiceName, recoveryv1connect.InstanceServiceName, recoveryv1connect.IdentityServiceName,
			recoveryv1connect.PolicyServiceName, recoveryv1connect.WatchdogServiceName,
			recoveryv1connect.RollbackServiceName, recoveryv1connect.DiagnosticsServiceName,
		},
	})
	if refused < 40 {
		t.Errorf("%d calls were refused", refused)
	}
	t.Logf("%d calls refused", refused)
	// The enrolment port serves enrolment and nothing else.
	machine := m.authorities.Client(t, "recovery", nil)
	people := recoveryv1connect.NewIdentityServiceClient(machine, "https://"+m.service.EnrollAddr(),
		calls.Options(calls.Config{})...)
	if _, err := people.IssueBootstrap(m.ctx, &recoveryv1.IssueBootstrapRequest{Name: "node-1"}); err == nil {
		t.Error("the enrolment port issues tokens")
	}
}

func TestReadyz(t *testing.T) {
	m := start(t)
	testkit.Eventually(t, testkit.Patience, func() error {
		req, err := http.NewRequestWithContext(m.ctx, http.MethodGet, "http://"+m.service.OpsAddr()+"/readyz", http.NoBody)
		if err != nil {
			return err
		}
		resp, err := http.DefaultClient.Do(req) // a plain request to the ops port
		if err != nil {
			return err
		}
		defer func() { _ = resp.Body.Close() }()
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("status %d", resp.StatusCode)
		}
		return nil
	})
}

// TestSweepRuns waits for the periodic work to have been done once.
func TestSweepRuns(t *testing.T) {
	m := start(t)
	testkit.Eventually(t, testkit.Patience, func() error {
		families, err := m.registry.Gatherer().Gather()
		if err != nil {
			return err
		}
		runs := map[string]float64{}
		for _, f := range families {
			if !strings.HasSuffix(f.GetName(), "background_runs_total") {
				continue
			}
			for _, metric := range f.GetMetric() {
				of := map[string]string{}
				for _, l := range metric.GetLabel() {
					of[l.GetName()] = l.GetValue()
				}
				if of["job"] == "enrolments" {
					runs[of["outcome"]] += metric.GetCounter().GetValue()
				}
			}
		}
		if runs["done"] == 0 || runs["failed"] > 0 {
			return fmt.Errorf("sweeps by their outcome: %v", runs)
		}
		return nil
	})
}

// TestDatabaseAwayInvitesToAskAgain cuts every connection: requests meanwhile fail as unavailable, never as an internal
// error.
func TestDatabaseAwayInvitesToAskAgain(t *testing.T) {
	m := start(t)
	replica, url := m.client("nodeapi")
	sessions := recoveryv1connect.NewSessionServiceClient(replica, url, calls.Options(calls.Config{})...)
	ask := func() error {
		_, err := sessions.OpenSessions(m.ctx, &recoveryv1.OpenSessionsRequest{Sessions: []*recoveryv1.OpenSession{{
			SessionId: ids.New(), NodeId: ids.New(), NodeInstanceId: ids.New(), Serial: "aa",
		}}})
		return err
	}
	if err := ask(); err != nil {
		t.Fatal(err)
	}
	admin, err := pg.Open(m.ctx, pg.Config{URL: m.db.AdminURL()})
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close()
	stop := make(chan struct{})
	var cutter sync.WaitGroup
	cutter.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			_, err := admin.Exec(m.ctx, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
				WHERE usename = 'recovery' AND datname = current_database()`)
			if err != nil {
				t.Error(err)
				return
			}
		}
	})
	for cut := 0; cut < 5 && !t.Failed() && m.ctx.Err() == nil; {
		if err := ask(); err != nil {
			cut++
			if !fault.Has(err, commonv1.Reason_REASON_UNAVAILABLE) {
				t.Errorf("asked without a database: %v", err)
			}
		}
	}
	close(stop)
	cutter.Wait()
	testkit.Eventually(t, testkit.Patience, ask)
}

// TestOptionalTypesOfTasksExist: a name that is no type of task is refused, and one that is is not.
func TestOptionalTypesOfTasksExist(t *testing.T) {
	cfg := recovery.Default()
	for name, refused := range map[string]bool{"storage.allocate": false, "storage.alocate": true} {
		cfg.OptionalTaskTypes = []string{name}
		if err := cfg.Validate(); strings.Contains(err.Error(), "optional_task_types") != refused {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestSettingsOfEvidenceAreBounded: an outage cannot begin while a replica may be silent, and nothing counts for less
// than no time.
func TestSettingsOfEvidenceAreBounded(t *testing.T) {
	for key, wrong := range map[string]func(*recovery.Config){
		"outage_after":   func(c *recovery.Config) { c.OutageAfter = replicas.SilentAfter - time.Second },
		"refused_fresh":  func(c *recovery.Config) { c.RefusedFresh = -time.Second },
		"rejected_fresh": func(c *recovery.Config) { c.RejectedFresh = 0 },
	} {
		cfg := recovery.Default()
		if err := cfg.Validate(); strings.Contains(err.Error(), key) {
			t.Errorf("the default: %v", err)
		}
		wrong(&cfg)
		if err := cfg.Validate(); !strings.Contains(err.Error(), key) {
			t.Errorf("%s: %v", key, err)
		}
	}
}

func TestConfigReportsEverything(t *testing.T) {
	err := recovery.Default().Validate()
	if err == nil {
		t.Fatal("an empty configuration is accepted")
	}
	for _, key := range []string{
		"ca_dir", "join_state_keys", "profile.api_url", "profile.recovery_url", "profile.ca_file",
		"task_signing_pubkeys_file", "assertion_pubkeys_file", "peers.lifecycle",
	} {
		if !slices.ContainsFunc(strings.Split(err.Error(), "\n"),
			func(line string) bool { return strings.HasPrefix(line, key+" is needed") }) {
			t.Errorf("%s is not reported in %q", key, err)
		}
	}
}
