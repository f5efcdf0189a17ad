package nodeapi_test

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/nodeapi"
	"github.com/gpuaas/mesh/services/nodeapi/nodeapitest"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const patience = time.Minute

// kit has the backend and the authorities around replicas of nodeapi.
type kit struct {
	t                   *testing.T
	nodes, services     *nodeapitest.Authority
	backend             *nodeapitest.Backend
	db                  *testkit.Database
	recovery, lifecycle string
}

func newKit(t *testing.T, prepare ...func(*nodeapitest.Backend)) *kit {
	t.Helper()
	testkit.IO(t)
	k := &kit{t: t, db: testkit.DB(t)}
	var err error
	if k.nodes, err = nodeapitest.NewAuthority("nodes"); err != nil {
		t.Fatal(err)
	}
	if k.services, err = nodeapitest.NewAuthority("services"); err != nil {
		t.Fatal(err)
	}
	if k.backend, err = nodeapitest.NewBackend(); err != nil {
		t.Fatal(err)
	}
	for _, p := range prepare {
		p(k.backend)
	}
	if k.recovery, k.lifecycle, err = k.backend.Listen(t.Context(), testkit.Logger(t), k.services); err != nil {
		t.Fatal(err)
	}
	run(t, "plane", k.backend.Run)
	return k
}

// run runs f until the test ends, or until the returned function is called.
func run(t *testing.T, name string, f func(context.Context) error) func() {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	stop := sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
		case <-time.After(2 * patience):
			t.Errorf("%s does not end", name)
		}
	})
	t.Cleanup(stop)
	return stop
}

// replica is a running nodeapi.
type replica struct {
	*nodeapi.Service
	stop func()
}

func (k *kit) replica(change ...func(*nodeapi.Config)) *replica {
	k.t.Helper()
	dir := k.t.TempDir()
	files, err := nodeapitest.WriteFiles(dir, "nodeapi", k.nodes, k.services)
	if err != nil {
		k.t.Fatal(err)
	}
	cfg := nodeapi.Default()
	cfg.TrustDomain = nodeapitest.TrustDomain
	cfg.DatabaseURLFile = k.secret(dir, "db", k.db.URL(pg.RoleNodeAPI))
	cfg.SequencerURLFile = k.secret(dir, "seq", k.db.URL(pg.RoleSequencer))
	cfg.TLS.CertFile, cfg.TLS.KeyFile, cfg.TLS.CAFile, cfg.NodeCAFile = files.Cert, files.Key, files.ServiceCA,
		files.NodeCA
	public, err := k.backend.Keys.Public()
	if err != nil {
		k.t.Fatal(err)
	}
	cfg.JoinStatePubkeysFile = string(k.secret(dir, "join-state.pub", public.String()))
	cfg.Peers.Recovery, cfg.Peers.Lifecycle = k.recovery, k.lifecycle
	cfg.OpenBurst = 100
	cfg.DrainSpread, cfg.DrainTimeout = 0, 2*time.Second
	for _, c := range change {
		c(&cfg)
	}
	if err := cfg.Validate(); err != nil {
		k.t.Fatal(err)
	}
	registry, err := obs.NewRegistry()
	if err != nil {
		k.t.Fatal(err)
	}
	s, err := nodeapi.New(k.t.Context(), nodeapi.Deps{Logger: testkit.Logger(k.t), Registry: registry}, cfg)
	if err != nil {
		k.t.Fatal(err)
	}
	return &replica{Service: s, stop: run(k.t, "nodeapi", s.Run)}
}

func (k *kit) secret(dir, name, text string) config.SecretFile {
	k.t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		k.t.Fatal(err)
	}
	return config.SecretFile(path)
}

// agent is one end of one stream, as hostile as the test wants it.
type agent struct {
	t            *testing.T
	id, instance string
	cert         tls.Certificate
	cc           *grpc.ClientConn
	stream       grpc.BidiStreamingClient[nodev1.ConnectRequest, nodev1.ConnectResponse]
	frames       chan *nodev1.ConnectResponse
	ended        chan error
	cancel       context.CancelFunc
	nonce        string
	generation   int64
	session      string
	join         []byte // the join state of the last Welcome
}

// node returns an agent of a new node that is not connected.
func (k *kit) node() *agent {
	k.t.Helper()
	a := &agent{t: k.t, id: ids.New(), instance: ids.New()}
	var err error
	if a.cert, err = k.nodes.Node(a.id); err != nil {
		k.t.Fatal(err)
	}
	return a
}

// again returns an agent for the same node's next connection.
func (a *agent) again() *agent {
	return &agent{t: a.t, id: a.id, instance: a.instance, cert: a.cert, join: a.join}
}

// connect opens the stream of an agent, and reads it if read is true.
func (k *kit) connect(a *agent, addr string, read bool) {
	k.t.Helper()
	conf, err := k.clientTLS(a.cert)
	if err != nil {
		k.t.Fatal(err)
	}
	if a.cc, err = grpc.NewClient("passthrough:///"+addr,
		grpc.WithTransportCredentials(credentials.NewTLS(conf))); err != nil {
		k.t.Fatal(err)
	}
	var ctx context.Context
	ctx, a.cancel = context.WithCancel(context.WithoutCancel(k.t.Context()))
	if a.stream, err = nodev1.NewNodeServiceClient(a.cc).Connect(ctx); err != nil {
		k.t.Fatal(err)
	}
	a.frames, a.ended = make(chan *nodev1.ConnectResponse, 4096), make(chan error, 1)
	read1 := make(chan struct{})
	if read {
		go func() {
			defer close(read1)
			for {
				f, err := a.stream.Recv()
				if err != nil {
					a.ended <- err
					return
				}
				a.frames <- f
			}
		}()
	} else {
		close(read1)
	}
	k.t.Cleanup(func() {
		a.cancel()
		_ = a.cc.Close()
		<-read1
	})
}

func (k *kit) clientTLS(cert tls.Certificate) (*tls.Config, error) {
	roots, err := k.services.Bundle()
	if err != nil {
		return nil, err
	}
	conf, err := pki.ClientTLS(pki.ClientConfig{
		Roots: roots, Server: pki.ServiceID(nodeapitest.TrustDomain, "nodeapi"),
		NextProtos: []string{"h2"},
	})
	if err != nil {
		return nil, err
	}
	conf.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &cert, nil }
	return conf, nil
}

// send writes one frame. A stream that the server has ended already fails with io.EOF, which is no failure of its own:
// next, denied and wantEnd report how the stream ended.
func (a *agent) send(f *nodev1.ConnectRequest) {
	a.t.Helper()
	if err := a.stream.Send(f); err != nil && !errors.Is(err, io.EOF) {
		a.t.Fatalf("send: %v", err)
	}
}

func (a *agent) hello(change ...func(*nodev1.Hello)) *nodev1.ConnectRequest {
	h := &nodev1.Hello{
		NodeId: a.id, NodeInstanceId: a.instance, LedgerId: ids.New(), AgentVersion: "test", ProtocolVersion: 1,
		Host: &commonv1.HostFacts{Hostname: "host", Cpus: 4}, JoinState: a.join,
	}
	for _, c := range change {
		c(h)
	}
	return &nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_Hello{Hello: h}}
}

func ready(generation int64) *nodev1.ConnectRequest {
	return &nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_Ready{Ready: &nodev1.Ready{Generation: generation}}}
}

func beat(sequence int64) *nodev1.ConnectRequest {
	return &nodev1.ConnectRequest{
		Frame: &nodev1.ConnectRequest_Heartbeat{Heartbeat: &nodev1.Heartbeat{Sequence: sequence}},
	}
}

func result(ref *nodev1.TaskRef, output []byte) *nodev1.ConnectRequest {
	return &nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_TaskResult{TaskResult: &nodev1.TaskResult{
		Task: ref, State: commonv1.TaskState_TASK_STATE_SUCCEEDED, Output: output,
	}}}
}

// next waits for a frame for which good returns true, and skips others.
func (a *agent) next(what string, good func(*nodev1.ConnectResponse) bool) *nodev1.ConnectResponse {
	a.t.Helper()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	for {
		select {
		case f := <-a.frames:
			if good(f) {
				return f
			}
		case err := <-a.ended:
			a.ended <- err
			select {
			case f := <-a.frames:
				if good(f) {
					return f
				}
				continue
			default:
			}
			a.t.Fatalf("the stream ended while waiting for %s: %v", what, err)
		case <-deadline.C:
			a.t.Fatalf("no %s", what)
		}
	}
}

// exactly requires that good returns true for the very next frame. Frames that a slow server sends meanwhile as signs
// of life do not count.
func (a *agent) exactly(what string, good func(*nodev1.ConnectResponse) bool) *nodev1.ConnectResponse {
	a.t.Helper()
	return a.next(what, func(f *nodev1.ConnectResponse) bool {
		if ack := f.GetHeartbeatAck(); ack != nil && ack.GetSequence() == 0 {
			return false
		}
		if !good(f) {
			a.t.Fatalf("%T instead of %s", f.GetFrame(), what)
		}
		return true
	})
}

// open opens the session up to Admitted and checks the order of the frames.
func (a *agent) open(change ...func(*nodev1.Hello)) {
	a.t.Helper()
	a.send(a.hello(change...))
	w := a.exactly("Welcome", func(f *nodev1.ConnectResponse) bool { return f.GetWelcome() != nil }).GetWelcome()
	a.nonce, a.generation, a.session, a.join = w.GetNonce(), w.GetGeneration(), w.GetSessionId(), w.GetJoinState()
	a.send(ready(a.generation))
	admitted := a.exactly("Admitted", func(f *nodev1.ConnectResponse) bool { return f.GetAdmitted() != nil }).GetAdmitted()
	if admitted.GetGeneration() != a.generation {
		a.t.Fatalf("admitted to generation %d of %d", admitted.GetGeneration(), a.generation)
	}
}

// session returns the agent of a new node with an admitted session whose gate is raised.
func (k *kit) session(r *replica) *agent {
	k.t.Helper()
	a := k.node()
	k.connect(a, r.AgentAddr(), true)
	a.open()
	k.raised(a)
	// Facts of one session that come together are written as one. After the wait later facts are those of the test.
	testkit.Eventually(k.t, patience, func() error { return k.wantFacts(a.session, "SESSION_STATE_ADMITTED ") })
	return a
}

func (k *kit) raised(a *agent) {
	k.t.Helper()
	testkit.Eventually(k.t, patience, func() error {
		for _, r := range k.backend.Readies() {
			if r.GetSessionId() == a.session {
				return nil
			}
		}
		return errors.New("the gate is not raised")
	})
}

// denied requires a denial with a reason and the end of the stream.
func (a *agent) denied(reason commonv1.Reason) *commonv1.Denial {
	a.t.Helper()
	d := a.next("Denied", func(f *nodev1.ConnectResponse) bool { return f.GetDenied() != nil }).GetDenied()
	if d.GetReason() != reason {
		a.t.Fatalf("denied as %s, want %s", d.GetReason(), reason)
	}
	_ = a.wantEnd() // the status of the end is not checked here
	return d
}

func (a *agent) wantEnd() error {
	a.t.Helper()
	select {
	case err := <-a.ended:
		a.ended <- err
		return err
	case <-time.After(patience):
		a.t.Fatal("the stream goes on")
		return nil
	}
}

// offers drains the received frames and returns the number of offers among them.
func (a *agent) offers() int {
	n := 0
	for {
		select {
		case f := <-a.frames:
			if f.GetTaskOffer() != nil {
				n++
			}
		default:
			return n
		}
	}
}

func reasonOf(err error) commonv1.Reason { return fault.ReasonOf(fault.FromGRPC(err)) }

// facts returns the states of a session in its events.
func (k *kit) facts(session string) ([]string, error) {
	list, err := testkit.ReadEvents(k.t.Context(), k.db.Pool(pg.RoleReadmodel),
		`kind = 'session.changed' AND aggregate_id = $1`, session)
	if err != nil {
		return nil, fmt.Errorf("read facts: %w", err)
	}
	slices.SortStableFunc(
		list, func(a, b testkit.Event) int { return cmp.Compare(a.AggregateVersion, b.AggregateVersion) },
	)
	var out []string
	for _, e := range list {
		out = append(out, e.Text("state")+" "+e.Text("close_reason"))
	}
	return out, nil
}
