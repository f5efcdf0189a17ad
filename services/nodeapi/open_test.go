package nodeapi_test

import (
	"bytes"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/joinstate"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/nodeapi"
	"github.com/gpuaas/mesh/services/nodeapi/nodeapitest"
)

func TestSessionOpensInOrder(t *testing.T) {
	k := newKit(t)
	r := k.replica()
	a := k.node()
	k.connect(a, r.AgentAddr(), true)
	a.open(func(h *nodev1.Hello) { h.BootId = "boot\x00id" })
	k.raised(a)
	ready := k.backend.Readies()[0]
	state, err := k.backend.Keys.Verify(ready.GetJoinState())
	if err != nil {
		t.Fatal(err)
	}
	if state.NodeID != a.id || state.Generation != a.generation || ready.GetSessionId() != a.session {
		t.Errorf("the gate was raised with %+v", state)
	}
	open := k.backend.Opened()[0]
	if open.GetSerial() != pki.SerialString(a.cert.Leaf.SerialNumber) || open.GetBootId() != "boot\uFFFDid" {
		t.Errorf("opened with %v", open)
	}
	// Heartbeats are answered, and are neither calls nor rows.
	testkit.Eventually(t, patience, func() error { return k.wantFacts(a.session, "SESSION_STATE_ADMITTED ") })
	var before map[string]int
	testkit.Eventually(t, patience, func() error {
		if before = k.backend.Calls(); before["LeaseTasks"] == 0 || before["WatchWork"] == 0 {
			return fmt.Errorf("calls %v", before)
		}
		return nil
	})
	for i := range 200 {
		a.send(beat(int64(i)))
	}
	a.next("an acknowledged heartbeat", func(f *nodev1.ConnectResponse) bool {
		return f.GetHeartbeatAck() != nil && f.GetHeartbeatAck().GetProfileFingerprint() == "profile" &&
			!f.GetHeartbeatAck().GetServerTime().AsTime().IsZero()
	})
	if after := k.backend.Calls(); fmt.Sprint(before) != fmt.Sprint(after) {
		t.Errorf("heartbeats became calls: %v, then %v", before, after)
	}
	if err := k.wantFacts(a.session, "SESSION_STATE_ADMITTED "); err != nil {
		t.Error(err)
	}
	a.send(&nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_Goodbye{Goodbye: &nodev1.Goodbye{Reason: "test"}}})
	_ = a.wantEnd()
	testkit.Eventually(t, patience, func() error {
		return k.wantFacts(a.session, "SESSION_STATE_ADMITTED ", "SESSION_STATE_CLOSED ")
	})
}

func (k *kit) wantFacts(session string, want ...string) error {
	got, err := k.facts(session)
	if err != nil {
		return err
	}
	if !slices.Equal(got, want) {
		return fmt.Errorf("facts %q, want %q", got, want)
	}
	return nil
}

// Scenario: A01.
func TestHelloOfAnotherNodeIsRefused(t *testing.T) {
	k := newKit(t)
	r := k.replica()
	b := k.session(r)
	a := k.node()
	k.connect(a, r.AgentAddr(), true)
	a.send(a.hello(func(h *nodev1.Hello) { h.NodeId = b.id }))
	a.denied(commonv1.Reason_REASON_IDENTITY_MISMATCH)
	b.send(beat(1))
	b.next("an answer", func(f *nodev1.ConnectResponse) bool { return f.GetHeartbeatAck() != nil })
	if n := len(k.backend.Opened()); n != 1 {
		t.Errorf("%d opens reached recovery", n)
	}
}

// Scenarios: A02, A04, A05.
func TestCertificates(t *testing.T) {
	k := newKit(t)
	r := k.replica()
	foreign, err := nodeapitest.NewAuthority("foreign")
	if err != nil {
		t.Fatal(err)
	}
	name := pki.NodeID(nodeapitest.TrustDomain, ids.New()).String()
	issue := func(a *nodeapitest.Authority, l nodeapitest.Leaf) tls.Certificate {
		t.Helper()
		cert, err := a.Issue(l)
		if err != nil {
			t.Fatal(err)
		}
		return cert
	}
	uris := func(names ...string) nodeapitest.Leaf { return nodeapitest.Leaf{URIs: names} }
	refused := map[string]tls.Certificate{
		"none":            {},
		"other authority": issue(foreign, uris(name)),
		"expired": issue(k.nodes,
			nodeapitest.Leaf{URIs: []string{name}, From: time.Now().Add(-2 * time.Hour), To: time.Now().Add(-time.Minute)}),
		"not yet valid": issue(k.nodes,
			nodeapitest.Leaf{URIs: []string{name}, From: time.Now().Add(time.Hour), To: time.Now().Add(2 * time.Hour)}),
		"two names":        issue(k.nodes, uris(name, pki.NodeID(nodeapitest.TrustDomain, ids.New()).String())),
		"no name":          issue(k.nodes, nodeapitest.Leaf{Common: name}),
		"server use only":  issue(k.nodes, nodeapitest.Leaf{URIs: []string{name}, Usage: x509.ExtKeyUsageServerAuth}),
		"a service's":      issue(k.services, uris(pki.ServiceID(nodeapitest.TrustDomain, "recovery").String())),
		"service by nodes": issue(k.nodes, uris(pki.ServiceID(nodeapitest.TrustDomain, "recovery").String())),
		"other domain":     issue(k.nodes, uris(pki.NodeID("other.test", ids.New()).String())),
		"an authority":     issue(k.nodes, nodeapitest.Leaf{URIs: []string{name}, Authority: true}),
		"a host name too":  issue(k.nodes, nodeapitest.Leaf{URIs: []string{name}, DNS: []string{"host.test"}}),
	}
	for what, cert := range refused {
		t.Run(what, func(t *testing.T) {
			a := &agent{t: t, id: ids.New(), instance: ids.New(), cert: cert}
			if err := k.try(a, r.AgentAddr()); err == nil {
				t.Error("the stream was answered")
			}
		})
	}
	if n := len(k.backend.Opened()); n != 0 {
		t.Errorf("%d opens reached recovery", n)
	}
	// The common name is ignored.
	a := k.node()
	a.cert = issue(k.nodes, nodeapitest.Leaf{
		URIs:   []string{pki.NodeID(nodeapitest.TrustDomain, a.id).String()},
		Common: "spiffe://" + nodeapitest.TrustDomain + "/node/" + ids.New(),
	})
	k.connect(a, r.AgentAddr(), true)
	a.open()
	if got := k.backend.Opened()[0].GetNodeId(); got != a.id {
		t.Errorf("opened as %s", got)
	}
}

// try sends a Hello and returns the error with which the stream ended.
func (k *kit) try(a *agent, addr string) error {
	conf, err := k.clientTLS(a.cert)
	if err != nil {
		return err
	}
	cc, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(credentials.NewTLS(conf)))
	if err != nil {
		return err
	}
	defer func() { _ = cc.Close() }()
	stream, err := nodev1.NewNodeServiceClient(cc).Connect(a.t.Context())
	if err != nil {
		return err
	}
	_ = stream.Send(a.hello()) // the refusal is read
	_, err = stream.Recv()
	return err
}

// TestOversizeFrame: a frame that is too large ends its stream before it is read whole.
func TestOversizeFrame(t *testing.T) {
	k := newKit(t)
	a := k.session(k.replica())
	_ = a.stream.Send(result(&nodev1.TaskRef{TaskId: ids.New(), Attempt: 1}, bytes.Repeat([]byte("x"), 2<<20)))
	if err := a.wantEnd(); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("the stream ended with %v", err)
	}
}

// TestWhatIsNotTheProtocol: each violation ends its own stream with a reason, and no other stream.
func TestWhatIsNotTheProtocol(t *testing.T) {
	k := newKit(t)
	r := k.replica(func(c *nodeapi.Config) { c.FramesPerSecond = 100 })
	impatient := k.replica(func(c *nodeapi.Config) { c.FirstFrame = 300 * time.Millisecond })
	bystander := k.session(r)
	open := func(a *agent) { a.open() }
	welcomed := func(a *agent) {
		a.send(a.hello())
		a.exactly("Welcome", func(f *nodev1.ConnectResponse) bool { return f.GetWelcome() != nil })
	}
	cases := []struct {
		name   string
		before func(*agent)
		frame  *nodev1.ConnectRequest
		times  int
		reason commonv1.Reason
	}{
		{"no first frame", nil, nil, 0, commonv1.Reason_REASON_DEADLINE_EXCEEDED},
		{"heartbeat before Hello", nil, beat(1), 1, commonv1.Reason_REASON_PROTOCOL_VIOLATION},
		{"empty frame", nil, &nodev1.ConnectRequest{}, 1, commonv1.Reason_REASON_INVALID_ARGUMENT},
		{
			"Hello without ids", nil, &nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_Hello{Hello: &nodev1.Hello{}}}, 1,
			commonv1.Reason_REASON_INVALID_ARGUMENT,
		},
		{
			"result before Ready", welcomed, result(&nodev1.TaskRef{TaskId: ids.New(), Attempt: 1}, nil), 1,
			commonv1.Reason_REASON_PROTOCOL_VIOLATION,
		},
		{"another generation", welcomed, ready(77), 1, commonv1.Reason_REASON_PROTOCOL_VIOLATION},
		{"second Hello", open, nil, -1, commonv1.Reason_REASON_PROTOCOL_VIOLATION},
		{
			"output over its bound", open,
			result(&nodev1.TaskRef{TaskId: ids.New(), Attempt: 1}, bytes.Repeat([]byte("x"), 300<<10)), 1,
			commonv1.Reason_REASON_INVALID_ARGUMENT,
		},
		{"a flood", open, beat(1), 3000, commonv1.Reason_REASON_RATE_LIMITED},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			a := k.node()
			a.t = t
			to := r
			if c.times == 0 { // only the case that sends nothing: others may need longer for their first frame
				to = impatient
			}
			k.connect(a, to.AgentAddr(), true)
			if c.before != nil {
				c.before(a)
			}
			frame := c.frame
			if c.times < 0 {
				frame = a.hello()
			}
			for range max(c.times, -c.times) {
				if a.stream.Send(frame) != nil {
					break
				}
			}
			if d := a.denied(c.reason); d.GetAction() == commonv1.Action_ACTION_STOP {
				t.Error("an agent that is told to stop never comes back")
			}
		})
	}
	bystander.send(beat(1))
	bystander.next("an answer", func(f *nodev1.ConnectResponse) bool { return f.GetHeartbeatAck() != nil })
}

func TestOpensAreRationed(t *testing.T) {
	k := newKit(t)
	r := k.replica(func(c *nodeapi.Config) { c.OpenBurst, c.OpenEvery = 2, time.Hour })
	a := k.node()
	for i := range 5 { // two of the unproven budget, and two of the proven one
		a = a.again()
		k.connect(a, r.AgentAddr(), true)
		if i < 4 {
			a.open()
			continue
		}
		a.send(a.hello())
		d := a.denied(commonv1.Reason_REASON_RATE_LIMITED)
		if d.GetRetryAfter().AsDuration() < 50*time.Minute {
			t.Errorf("retry after %s", d.GetRetryAfter().AsDuration())
		}
	}
	k.session(r) // another node is not slowed
}

// TestAnOpeningThatWaitsIsReported: while recovery has not answered, the agent is sent signs that its opening is under
// way.
func TestAnOpeningThatWaitsIsReported(t *testing.T) {
	waiting := make(chan struct{})
	release := sync.OnceFunc(func() { close(waiting) })
	k := newKit(t, func(p *nodeapitest.Backend) {
		p.Deny = func(*recoveryv1.OpenSession) *commonv1.Denial {
			<-waiting
			return nil
		}
	})
	t.Cleanup(release)
	a := k.node()
	k.connect(a, k.replica().AgentAddr(), true)
	a.send(a.hello())
	for range 2 {
		f := a.next("a frame", func(*nodev1.ConnectResponse) bool { return true })
		if ack := f.GetHeartbeatAck(); ack == nil || ack.GetSequence() != 0 || ack.GetServerTime() == nil {
			t.Fatalf("%v before Welcome", f)
		}
	}
	release()
	a.generation = a.exactly("Welcome",
		func(f *nodev1.ConnectResponse) bool { return f.GetWelcome() != nil }).GetWelcome().GetGeneration()
	a.send(ready(a.generation))
	a.exactly("Admitted", func(f *nodev1.ConnectResponse) bool { return f.GetAdmitted() != nil })
}

// TestShortCertificatesMayOpenMoreOften: with a certificate of twenty seconds, which is dated back like any other, a
// node may open a stream every two seconds.
func TestShortCertificatesMayOpenMoreOften(t *testing.T) {
	k := newKit(t)
	r := k.replica(func(c *nodeapi.Config) { c.OpenBurst, c.OpenEvery = 1, time.Hour })
	a := k.node()
	var err error
	if a.cert, err = k.nodes.Issue(nodeapitest.Leaf{
		URIs: []string{pki.NodeID(nodeapitest.TrustDomain, a.id).String()}, From: time.Now().Add(-pki.Backdate),
		To: time.Now().Add(20 * time.Second),
	}); err != nil {
		t.Fatal(err)
	}
	for range 2 { // one of each budget
		a = a.again()
		k.connect(a, r.AgentAddr(), true)
		a.open()
	}
	a = a.again()
	k.connect(a, r.AgentAddr(), true)
	a.send(a.hello())
	f := a.next("Welcome or Denied",
		func(f *nodev1.ConnectResponse) bool { return f.GetWelcome() != nil || f.GetDenied() != nil })
	if f.GetWelcome() != nil {
		return // the two seconds are over
	}
	wait := f.GetDenied().GetRetryAfter().AsDuration()
	if f.GetDenied().GetReason() != commonv1.Reason_REASON_RATE_LIMITED || wait <= 0 || wait > 2*time.Second {
		t.Errorf("denied: %v", f.GetDenied())
	}
}

// TestAShutNodeMayAskAtItsPace: a node on hold is told when to try again, and may open a stream then, however rarely
// other nodes may.
func TestAShutNodeMayAskAtItsPace(t *testing.T) {
	var shut atomic.Bool
	k := newKit(t, func(p *nodeapitest.Backend) {
		p.Deny = func(*recoveryv1.OpenSession) *commonv1.Denial {
			if !shut.Load() {
				return nil
			}
			return fault.ToDenial(fault.New(commonv1.Reason_REASON_IDENTITY_HELD, ""), "")
		}
	})
	r := k.replica(func(c *nodeapi.Config) { c.OpenBurst, c.OpenEvery = 1, time.Hour })
	a := k.session(r)
	shut.Store(true)
	k.backend.Change(
		a.id, func(n *recoveryv1.NodeAuthority) { n.State = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD },
	)
	wait := a.denied(commonv1.Reason_REASON_IDENTITY_HELD).GetRetryAfter().AsDuration()
	if wait <= 0 || wait > 5*time.Second {
		t.Fatalf("a held node is told to ask again after %s", wait)
	}
	for range 2 {
		select {
		case <-time.After(wait):
		case <-t.Context().Done():
		}
		a = a.again()
		k.connect(a, r.AgentAddr(), true)
		a.send(a.hello())
		a.denied(commonv1.Reason_REASON_IDENTITY_HELD)
	}
	for tries := 0; ; tries++ { // faster than it was told, unless this machine was slow
		a = a.again()
		k.connect(a, r.AgentAddr(), true)
		a.send(a.hello())
		reason := a.next(
			"Denied", func(f *nodev1.ConnectResponse) bool { return f.GetDenied() != nil },
		).GetDenied().GetReason()
		if reason == commonv1.Reason_REASON_RATE_LIMITED {
			return
		}
		if reason != commonv1.Reason_REASON_IDENTITY_HELD || tries == 20 {
			t.Fatalf("denied as %s", reason)
		}
	}
}

func TestRefusalsOfRecoveryReachTheAgent(t *testing.T) {
	k := newKit(t, func(p *nodeapitest.Backend) {
		p.Deny = func(*recoveryv1.OpenSession) *commonv1.Denial {
			return fault.ToDenial(fault.New(commonv1.Reason_REASON_SERIAL_SUPERSEDED, ""), "")
		}
	})
	r := k.replica()
	a := k.node()
	k.connect(a, r.AgentAddr(), true)
	a.send(a.hello())
	if d := a.denied(commonv1.Reason_REASON_SERIAL_SUPERSEDED); d.GetAction() != commonv1.Action_ACTION_RENEW {
		t.Errorf("told to %s", d.GetAction())
	}
	if got := reasonOf(a.wantEnd()); got != commonv1.Reason_REASON_SERIAL_SUPERSEDED {
		t.Errorf("the stream's status says %s", got)
	}
}

// TestChallenge: an agent with an old generation is asked for a signature; only a valid one in time proves a copy.
func TestChallenge(t *testing.T) {
	k := newKit(t, func(p *nodeapitest.Backend) { p.Challenge = func(*recoveryv1.OpenSession) bool { return true } })
	r := k.replica(func(c *nodeapi.Config) { c.ChallengeWithin = time.Minute })
	impatient := k.replica(func(c *nodeapi.Config) { c.ChallengeWithin = 3 * time.Second })
	cases := []struct {
		name     string
		answer   func(a *agent, nonce []byte)
		answered bool
	}{
		{"answered", func(a *agent, nonce []byte) { a.answer(nonce, a.id) }, true},
		{"answered for another node", func(a *agent, nonce []byte) { a.answer(nonce, ids.New()) }, false},
		{"another nonce", func(a *agent, _ []byte) { a.answer(bytes.Repeat([]byte("n"), 32), a.id) }, false},
		{"not answered", func(*agent, []byte) {}, false},
		{"hung up", func(a *agent, _ []byte) { a.cancel() }, false},
	}
	for i, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			a := k.node()
			a.t = t
			addr := r.AgentAddr()
			if c.name == "not answered" {
				addr = impatient.AgentAddr()
			}
			k.connect(a, addr, true)
			a.send(a.hello())
			challenge := a.exactly("Challenge",
				func(f *nodev1.ConnectResponse) bool { return f.GetChallenge() != nil }).GetChallenge()
			c.answer(a, challenge.GetNonce())
			_ = a.wantEnd()
			testkit.Eventually(t, patience, func() error {
				got := k.backend.Challenges()
				if len(got) <= i {
					return errors.New("not reported")
				}
				if got[i].GetNodeId() != a.id || got[i].GetAnswered() != c.answered {
					return fmt.Errorf("reported %v", got[i])
				}
				return nil
			})
		})
	}
}

func (a *agent) answer(nonce []byte, nodeID string) {
	a.t.Helper()
	key, ok := a.cert.PrivateKey.(crypto.Signer)
	if !ok {
		a.t.Fatal("the key cannot sign")
	}
	signature, err := joinstate.SignChallenge(key, nonce, nodeID)
	if err != nil {
		a.t.Fatal(err)
	}
	a.send(
		&nodev1.ConnectRequest{
			Frame: &nodev1.ConnectRequest_ChallengeAnswer{
				ChallengeAnswer: &nodev1.ChallengeAnswer{Nonce: nonce, Signature: signature},
			},
		},
	)
}

// TestGateIsAskedUntilItOpens: a node whose fence has not reached lifecycle yet is admitted and waits for work, not
// refused.
func TestGateIsAskedUntilItOpens(t *testing.T) {
	asked := 0
	k := newKit(t, func(p *nodeapitest.Backend) {
		p.Gate = func(*lifecyclev1.SessionReady) *commonv1.Denial {
			if asked++; asked < 4 {
				return fault.ToDenial(fault.New(commonv1.Reason_REASON_NODE_NOT_ADMITTED, ""), "")
			}
			return nil
		}
	})
	r := k.replica()
	a := k.session(r)
	k.backend.Queue(a.id, true, nodeapitest.Task(a.id, 10))
	a.next("an offer", func(f *nodev1.ConnectResponse) bool { return f.GetTaskOffer() != nil })
}
