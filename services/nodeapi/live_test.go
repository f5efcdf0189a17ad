package nodeapi_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/nodeapi"
	"github.com/gpuaas/mesh/services/nodeapi/nodeapitest"
)

func isOffer(f *nodev1.ConnectResponse) bool { return f.GetTaskOffer() != nil }
func isAck(f *nodev1.ConnectResponse) bool   { return f.GetTaskResultAck() != nil }

func (k *kit) fence(node string) {
	k.backend.Change(node, func(n *recoveryv1.NodeAuthority) {
		n.State, n.FenceEpoch = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED, n.GetFenceEpoch()+1
	})
}

func TestWorkGoesOutAndComesBack(t *testing.T) {
	k := newKit(t)
	r := k.replica()
	a, b := k.session(r), k.session(r)
	task := nodeapitest.Task(a.id, 100)
	k.backend.Queue(a.id, true, task)
	offer := a.next("an offer", isOffer).GetTaskOffer()
	if len(offer.GetEnvelope()) != 100 || offer.GetCorrelationId() != task.GetTask().GetTaskId() {
		t.Errorf("offered %v", offer)
	}
	a.send(
		&nodev1.ConnectRequest{
			Frame: &nodev1.ConnectRequest_TaskDelivered{
				TaskDelivered: &nodev1.TaskDelivered{Tasks: []*nodev1.TaskRef{task.GetTask()}},
			},
		},
	)
	a.send(
		&nodev1.ConnectRequest{
			Frame: &nodev1.ConnectRequest_TaskStarted{TaskStarted: &nodev1.TaskStarted{Task: task.GetTask()}},
		},
	)
	a.send(result(task.GetTask(), []byte("out")))
	ack := a.next("an acknowledgement", isAck).GetTaskResultAck()
	if len(ack.GetTasks()) != 1 || ack.GetTasks()[0].GetTaskId() != task.GetTask().GetTaskId() {
		t.Errorf("acknowledged %v", ack)
	}
	delivered, started, results := 0, 0, 0
	for _, rep := range k.backend.Reports() {
		delivered, started, results = delivered+len(rep.GetDelivered()), started+len(rep.GetStarted()),
			results+len(rep.GetResults())
		if rep.GetSessionId() != a.session || rep.GetGeneration() != a.generation || rep.GetNodeInstanceId() != a.instance {
			t.Errorf("reported for %v", rep)
		}
	}
	if delivered != 1 || started != 1 || results != 1 {
		t.Errorf("reported %d, %d, %d", delivered, started, results)
	}
	k.backend.Cancel(&lifecyclev1.TaskCancelHint{NodeId: a.id, Task: task.GetTask(), Epoch: 3, Reason: "why"})
	cancel := a.next("a cancel", func(f *nodev1.ConnectResponse) bool { return f.GetTaskCancel() != nil }).GetTaskCancel()
	if cancel.GetEpoch() != 3 || cancel.GetReason() != "why" {
		t.Errorf("cancel %v", cancel)
	}
	if b.offers() != 0 {
		t.Error("another node was offered the task")
	}
}

// TestLapsedAuthority: while recovery does not answer, no task is offered and no result is acknowledged; streams stay.
func TestLapsedAuthority(t *testing.T) {
	k := newKit(t)
	r := k.replica()
	a, fenced := k.session(r), k.session(r)
	k.backend.Silence(true)
	testkit.Eventually(t, patience, func() error {
		return k.wantUnready(r, "authority")
	})
	task := nodeapitest.Task(a.id, 10)
	k.backend.Queue(a.id, true, task)
	before := k.backend.Calls()
	a.send(result(&nodev1.TaskRef{TaskId: ids.New(), Attempt: 1}, nil))
	a.send(beat(1))
	a.next("an answer to a heartbeat", func(f *nodev1.ConnectResponse) bool {
		if isOffer(f) || isAck(f) {
			t.Errorf("%T while the view is stale", f.GetFrame())
		}
		return f.GetHeartbeatAck() != nil
	})
	if after := k.backend.Calls(); after["ReportTasks"] != before["ReportTasks"] ||
		after["LeaseTasks"] != before["LeaseTasks"] {
		t.Errorf("calls on a stale view: %v, then %v", before, after)
	}
	// The decision that was missed comes with the first answers, before anything else is sent.
	k.fence(fenced.id)
	k.backend.Queue(fenced.id, true, nodeapitest.Task(fenced.id, 10))
	k.backend.Silence(false)
	offered, acked := false, false
	a.next("the held offer and acknowledgement", func(f *nodev1.ConnectResponse) bool {
		offered, acked = offered || isOffer(f), acked || isAck(f)
		return offered && acked
	})
	fenced.denied(commonv1.Reason_REASON_IDENTITY_REVOKED_OR_FENCED)
	if fenced.offers() != 0 {
		t.Error("a fenced session was offered work")
	}
}

// wantUnready returns an error unless the ops port reports that the replica is not ready and names the check.
func (k *kit) wantUnready(r *replica, name string) error {
	req, err := http.NewRequestWithContext(k.t.Context(), http.MethodGet, "http://"+r.OpsAddr()+"/readyz", http.NoBody)
	if err != nil {
		return err
	}
	res, err := (&http.Client{}).Do(req)
	if err != nil {
		return err
	}
	body, err := io.ReadAll(res.Body)
	if err := errors.Join(err, res.Body.Close()); err != nil {
		return err
	}
	if res.StatusCode == http.StatusOK || !strings.Contains(string(body), name) {
		return fmt.Errorf("ready: %d %s", res.StatusCode, body)
	}
	return nil
}

// TestADecisionClosesTheSession: a decision closes the session without another request to recovery or a frame of the
// agent, and nothing is offered after it. Scenario: A10, A11.
func TestADecisionClosesTheSession(t *testing.T) {
	k := newKit(t)
	r := k.replica()
	states := map[commonv1.NodeIdentityState]commonv1.Reason{
		commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED:      commonv1.Reason_REASON_IDENTITY_REVOKED_OR_FENCED,
		commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD:        commonv1.Reason_REASON_IDENTITY_HELD,
		commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED: commonv1.Reason_REASON_IDENTITY_QUARANTINED,
		commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED:     commonv1.Reason_REASON_IDENTITY_RETIRED,
	}
	for state, reason := range states {
		t.Run(state.String(), func(t *testing.T) {
			a := k.session(r)
			// This agent reads its denial and does not hang up.
			before := k.backend.Calls()
			k.backend.Change(a.id, func(n *recoveryv1.NodeAuthority) { n.State = state })
			k.backend.Queue(a.id, true, nodeapitest.Task(a.id, 10))
			a.denied(reason)
			after := k.backend.Calls()
			for _, call := range []string{"WatchAuthority", "OpenSessions"} {
				if before[call] != after[call] {
					t.Errorf("%d calls of %s before the decision, %d after it", before[call], call, after[call])
				}
			}
			if a.offers() != 0 {
				t.Error("offered work after the decision")
			}
			testkit.Eventually(t, patience, func() error {
				return k.wantFacts(a.session, "SESSION_STATE_ADMITTED ",
					"SESSION_STATE_CLOSED REASON_"+strings.TrimPrefix(reason.String(), "REASON_"))
			})
		})
	}
}

// TestARetiredInstanceIsSentToRecovery: its session ends with a denial on which the agent opens a session at once,
// since only recovery knows whether a later epoch has its workspace, and reports that the instance was alive.
func TestARetiredInstanceIsSentToRecovery(t *testing.T) {
	k := newKit(t)
	a := k.session(k.replica())
	k.backend.Change(a.id, func(n *recoveryv1.NodeAuthority) {
		n.State, n.Launched = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED, true
	})
	if denial := a.denied(commonv1.Reason_REASON_SESSION_UNKNOWN); denial.GetAction() != commonv1.Action_ACTION_WAIT ||
		denial.GetRetryAfter().AsDuration() > time.Second {
		t.Errorf("told %v", denial)
	}
}

// TestWhatMayRunIsListedBeforeAnyOffer: the list is lifecycle's; if lifecycle sends none, the agent is told that there
// is none.
func TestWhatMayRunIsListedBeforeAnyOffer(t *testing.T) {
	runs := []*nodev1.WorkspaceEpoch{{WorkspaceId: ids.New(), Epoch: 3}}
	for name, listed := range map[string]bool{"listed": true, "of an earlier version": false} {
		t.Run(name, func(t *testing.T) {
			k := newKit(t, func(p *nodeapitest.Backend) {
				if listed {
					p.Runs = func(*lifecyclev1.SessionReady) []*nodev1.WorkspaceEpoch { return runs }
				}
			})
			a := k.session(k.replica())
			k.backend.Queue(a.id, true, nodeapitest.Task(a.id, 10))
			first := a.next("a list or an offer",
				func(f *nodev1.ConnectResponse) bool { return f.GetRunList() != nil || f.GetTaskOffer() != nil })
			list := first.GetRunList()
			if list == nil || list.GetUnlisted() == listed || len(list.GetMayRun()) != map[bool]int{true: 1}[listed] {
				t.Fatalf("the first frame is %v", first)
			}
			if listed && list.GetMayRun()[0].GetWorkspaceId() != runs[0].GetWorkspaceId() {
				t.Errorf("listed %v", list)
			}
			a.next("an offer", func(f *nodev1.ConnectResponse) bool { return f.GetTaskOffer() != nil })
		})
	}
}

// TestNewerSessionReplacesTheOlder on the same replica and on another; by a drain if it named the older one, else at
// once.
func TestNewerSessionReplacesTheOlder(t *testing.T) {
	k := newKit(t)
	first, second := k.replica(), k.replica()
	for _, c := range []struct {
		name  string
		to    *replica
		names bool
	}{
		{"here, unnamed", first, false},
		{"here, named", first, true},
		{"elsewhere, unnamed", second, false},
		{"elsewhere, named", second, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			old := k.session(first)
			newer := old.again()
			newer.t, old.t = t, t
			k.connect(newer, c.to.AgentAddr(), true)
			newer.open(func(h *nodev1.Hello) {
				if c.names {
					h.ReplacesNonce = old.nonce
				}
			})
			k.raised(newer)
			k.backend.Queue(newer.id, true, nodeapitest.Task(newer.id, 10))
			newer.next("an offer", isOffer)
			if !c.names {
				old.denied(commonv1.Reason_REASON_SESSION_SUPERSEDED)
				return
			}
			testkit.Eventually(t, patience, func() error {
				facts, err := k.facts(old.session)
				if err != nil || len(facts) < 2 || !strings.HasPrefix(facts[1], "SESSION_STATE_DRAINING") {
					return fmt.Errorf("not draining: %v, %w", facts, err)
				}
				return nil
			})
			// The older session may still report results, and gets their acknowledgements; it is offered nothing.
			old.send(result(&nodev1.TaskRef{TaskId: ids.New(), Attempt: 1}, nil))
			old.next("an acknowledgement", func(f *nodev1.ConnectResponse) bool {
				if isOffer(f) {
					t.Error("a draining session was offered work")
				}
				return isAck(f)
			})
		})
	}
}

// TestSupersededSerialIsClosed: a session is closed if its certificate is superseded, though its node is active. A
// decision from before the session was confirmed does not apply to it.
func TestSupersededSerialIsClosed(t *testing.T) {
	k := newKit(t)
	r := k.replica()
	a := k.session(r)
	k.backend.Change(a.id, func(n *recoveryv1.NodeAuthority) { n.CurrentSerial, n.Confirmed = "77", n.GetConfirmed()-1 })
	k.backend.Change(a.id, func(n *recoveryv1.NodeAuthority) {
		n.NextSerial, n.Confirmed = pki.SerialString(a.cert.Leaf.SerialNumber), a.generation
	})
	a.send(beat(1))
	a.next("an answer", func(f *nodev1.ConnectResponse) bool { return f.GetHeartbeatAck() != nil })
	k.backend.Change(a.id, func(n *recoveryv1.NodeAuthority) { n.NextSerial = "78" })
	a.denied(commonv1.Reason_REASON_SERIAL_SUPERSEDED)
}

// Scenario: A09.
func TestSessionEndsWithItsCertificate(t *testing.T) {
	k := newKit(t)
	r := k.replica()
	a := k.node()
	var err error
	if a.cert, err = k.nodes.Issue(nodeapitest.Leaf{
		URIs: []string{pki.NodeID(nodeapitest.TrustDomain, a.id).String()},
		To:   time.Now().Add(15 * time.Second),
	}); err != nil {
		t.Fatal(err)
	}
	k.connect(a, r.AgentAddr(), true)
	a.open()
	a.denied(commonv1.Reason_REASON_CERTIFICATE_EXPIRED)
	if late := time.Since(a.cert.Leaf.NotAfter); late < 0 || late > 30*time.Second {
		t.Errorf("closed %s after the certificate's end", late)
	}
}

func TestRenewalOverTheStream(t *testing.T) {
	ask := make(chan *recoveryv1.RenewCertificateRequest, 8)
	k := newKit(t, func(p *nodeapitest.Backend) {
		p.Renew = func(req *recoveryv1.RenewCertificateRequest) (*recoveryv1.RenewCertificateResponse, error) {
			ask <- req
			if len(req.GetCsr()) == 64 {
				return nil, fault.New(commonv1.Reason_REASON_CSR_REFUSED, "")
			}
			return &recoveryv1.RenewCertificateResponse{CertificateChainPem: []byte("chain"), RecoveryToken: "token"}, nil
		}
	})
	a := k.session(k.replica())
	renew := func(size int) *nodev1.CertificateIssued {
		t.Helper()
		id := ids.New()
		a.send(
			&nodev1.ConnectRequest{
				Frame: &nodev1.ConnectRequest_RenewRequest{
					RenewRequest: &nodev1.RenewRequest{
						RequestId: id, Csr: make([]byte, size), RecoveryPublicKey: []byte("public"),
					},
				},
			},
		)
		return a.next("a certificate",
			func(f *nodev1.ConnectResponse) bool { return f.GetCertificateIssued().GetRequestId() == id }).GetCertificateIssued()
	}
	if got := renew(100); string(got.GetCertificateChainPem()) != "chain" || got.GetRecoveryToken() != "token" {
		t.Errorf("issued %v", got)
	}
	if req := <-ask; req.GetNodeId() != a.id || req.GetSessionId() != a.session ||
		req.GetSerial() != pki.SerialString(a.cert.Leaf.SerialNumber) || string(req.GetRecoveryPublicKey()) != "public" {
		t.Errorf("asked %v", req)
	}
	if got := renew(64); got.GetDenied().GetReason() != commonv1.Reason_REASON_CSR_REFUSED {
		t.Errorf("refused with %v", got)
	}
}

// TestOneBadReportDelaysNoOther: lifecycle refuses the report of one node; the others are acknowledged and that session
// ends.
func TestOneBadReportDelaysNoOther(t *testing.T) {
	bad := ids.New()
	k := newKit(t, func(p *nodeapitest.Backend) {
		p.Report = func(req *lifecyclev1.ReportTasksRequest) error {
			for _, r := range req.GetReports() {
				for _, res := range r.GetResults() {
					if res.GetTask().GetTaskId() == bad {
						return fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "")
					}
				}
			}
			return nil
		}
	})
	r := k.replica()
	good, evil := k.session(r), k.session(r)
	k.backend.Silence(true) // so that both go in one report
	testkit.Eventually(t, patience, func() error { return k.wantUnready(r, "authority") })
	evil.send(result(&nodev1.TaskRef{TaskId: bad, Attempt: 1}, nil))
	good.send(result(&nodev1.TaskRef{TaskId: ids.New(), Attempt: 1}, nil))
	k.backend.Silence(false)
	good.next("an acknowledgement", isAck)
	evil.denied(commonv1.Reason_REASON_PROTOCOL_VIOLATION)
}

// TestShutdownSendsAgentsElsewhere: agents are asked to reconnect first, new ones are refused, and Run ends when all
// have left.
func TestShutdownSendsAgentsElsewhere(t *testing.T) {
	k := newKit(t)
	r := k.replica(func(c *nodeapi.Config) { c.DrainTimeout = 30 * time.Second })
	a, stays := k.session(r), k.session(r)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		r.stop()
	}()
	reconnect := func(f *nodev1.ConnectResponse) bool { return f.GetReconnect() != nil }
	for _, one := range []*agent{a, stays} {
		if got := one.next("Reconnect", reconnect).GetReconnect().GetReason(); got != commonv1.Reason_REASON_SERVER_DRAINING {
			t.Errorf("asked to go because of %s", got)
		}
	}
	late := k.node()
	k.connect(late, r.AgentAddr(), true)
	_ = late.stream.Send(late.hello())
	late.denied(commonv1.Reason_REASON_SERVER_DRAINING)
	// Results still count while an agent leaves.
	a.send(result(&nodev1.TaskRef{TaskId: ids.New(), Attempt: 1}, nil))
	a.next("an acknowledgement", isAck)
	for _, one := range []*agent{a, stays} {
		if err := one.stream.CloseSend(); err != nil {
			t.Error(err)
		}
		if err := one.wantEnd(); !errors.Is(err, io.EOF) {
			t.Errorf("the stream ended with %v", err)
		}
	}
	began := time.Now()
	<-stopped
	if took := time.Since(began); took > 25*time.Second {
		t.Errorf("stopped %s after the last agent had gone", took)
	}
	for _, one := range []*agent{a, stays} {
		if err := k.wantFacts(one.session, "SESSION_STATE_ADMITTED ", "SESSION_STATE_CLOSED "); err != nil {
			t.Error(err)
		}
	}
	var leaving bool
	if err := k.db.OwnerPool().QueryRow(t.Context(), `SELECT leaving FROM mesh.replica WHERE replica_id = $1`,
		r.ReplicaID()).Scan(&leaving); err != nil || !leaving {
		t.Errorf("last beat says leaving = %t, %v", leaving, err)
	}
}

// TestSlowAgentLosesItsStream: an agent that reads nothing while megabytes are offered to it loses its stream, and the
// replica's memory stays bounded.
func TestSlowAgentLosesItsStream(t *testing.T) {
	k := newKit(t)
	r := k.replica()
	a := k.node()
	k.connect(a, r.AgentAddr(), false)
	a.send(a.hello())
	var w *nodev1.ConnectResponse
	for w.GetWelcome() == nil {
		var err error
		if w, err = a.stream.Recv(); err != nil {
			t.Fatal(err)
		}
	}
	a.session = w.GetWelcome().GetSessionId()
	a.send(ready(w.GetWelcome().GetGeneration()))
	k.raised(a)
	// Two facts of one session that wait together are written as one.
	testkit.Eventually(t, testkit.Patience, func() error { return k.wantFacts(a.session, "SESSION_STATE_ADMITTED ") })
	for range 64 {
		k.backend.Queue(a.id, true, nodeapitest.Task(a.id, 200<<10), nodeapitest.Task(a.id, 200<<10))
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		return k.wantFacts(a.session, "SESSION_STATE_ADMITTED ", "SESSION_STATE_CLOSED REASON_SLOW_CONSUMER")
	})
}

// bare is a grpc service without any of nodeapi's code, to measure what a stream costs by itself.
type bare struct {
	nodev1.UnimplementedNodeServiceServer

	streams atomic.Int32
}

func (b *bare) Connect(s grpc.BidiStreamingServer[nodev1.ConnectRequest, nodev1.ConnectResponse]) error {
	b.streams.Add(1)
	for {
		if _, err := s.Recv(); err != nil {
			return nil //nolint:nilerr // the stream is over, however it ended
		}
	}
}

// TestIdleSessionsCostNoGoroutine beyond what grpc itself takes for a stream.
func TestIdleSessionsCostNoGoroutine(t *testing.T) {
	k := newKit(t)
	const sessions = 40
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	store, err := k.services.Service("nodeapi")
	if err != nil {
		t.Fatal(err)
	}
	roots, err := k.nodes.Bundle()
	if err != nil {
		t.Fatal(err)
	}
	conf, err := pki.ServerTLS(pki.ServerConfig{
		Store: store, TrustDomain: nodeapitest.TrustDomain, NextProtos: []string{"h2"},
		Clients: []pki.Trust{{Kind: pki.KindNode, Bundle: roots}},
	})
	if err != nil {
		t.Fatal(err)
	}
	plain, nothing := grpc.NewServer(grpc.Creds(credentials.NewTLS(conf))), &bare{}
	nodev1.RegisterNodeServiceServer(plain, nothing)
	go func() { _ = plain.Serve(lis) }()
	t.Cleanup(plain.Stop)
	r := k.replica()
	k.session(r)
	done := func() int {
		n := runtime.NumGoroutine()
		testkit.Eventually(t, patience, func() error {
			before := n
			if n = runtime.NumGoroutine(); n != before {
				return fmt.Errorf("%d goroutines, then %d", before, n)
			}
			return nil
		})
		return n
	}
	before := done()
	for range sessions {
		k.connect(k.node(), lis.Addr().String(), true)
	}
	testkit.Eventually(t, patience, func() error {
		if n := nothing.streams.Load(); n != sessions {
			return fmt.Errorf("%d of %d streams have begun", n, sessions)
		}
		return nil
	})
	cost := done() - before
	before = done()
	for range sessions {
		k.session(r)
	}
	testkit.Eventually(t, patience, func() error {
		// the number of the service's own goroutines varies
		if ours := runtime.NumGoroutine() - before; ours > cost+sessions/3 {
			return fmt.Errorf("%d sessions cost %d goroutines, bare streams %d", sessions, ours, cost)
		}
		return nil
	})
}

// TestUpdatesOfATaskStayTogether ends one task in the moment in which another is delivered: the report of the first
// does not include the update of the second, and no update of either is lost or reported twice.
func TestUpdatesOfATaskStayTogether(t *testing.T) {
	k := newKit(t)
	a := k.session(k.replica())
	short, long := nodeapitest.Task(a.id, 100), nodeapitest.Task(a.id, 100)
	k.backend.Queue(a.id, true, short, long)
	a.next("an offer", isOffer)
	a.next("another offer", isOffer)
	a.send(&nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_TaskDelivered{TaskDelivered: &nodev1.TaskDelivered{
		Tasks: []*nodev1.TaskRef{short.GetTask(), long.GetTask()},
	}}})
	a.send(
		&nodev1.ConnectRequest{
			Frame: &nodev1.ConnectRequest_TaskStarted{TaskStarted: &nodev1.TaskStarted{Task: long.GetTask()}},
		},
	)
	a.send(result(short.GetTask(), nil))
	a.next("an acknowledgement", isAck)
	a.send(result(long.GetTask(), nil))
	a.next("another acknowledgement", isAck)
	said := map[string][]string{}
	for _, rep := range k.backend.Reports() {
		for _, ref := range rep.GetDelivered() {
			said[ref.GetTaskId()] = append(said[ref.GetTaskId()], "delivered")
		}
		for _, f := range rep.GetStarted() {
			said[f.GetTask().GetTaskId()] = append(said[f.GetTask().GetTaskId()], "started")
		}
		for _, f := range rep.GetResults() {
			said[f.GetTask().GetTaskId()] = append(said[f.GetTask().GetTaskId()], "ended")
		}
	}
	for task, want := range map[*lifecyclev1.LeasedTask]string{short: "delivered ended", long: "delivered started ended"} {
		if got := strings.Join(said[task.GetTask().GetTaskId()], " "); got != want {
			t.Errorf("reported of a task: %s; want %s", got, want)
		}
	}
}
