package session_test

import (
	"cmp"
	"context"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/mesh/agent/agenttest"
	"github.com/gpuaas/mesh/agent/backoff"
	"github.com/gpuaas/mesh/agent/clock"
	"github.com/gpuaas/mesh/agent/diag"
	"github.com/gpuaas/mesh/agent/identity"
	"github.com/gpuaas/mesh/agent/session"
	"github.com/gpuaas/mesh/agent/session/memory"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pki"
)

// harness is one agent's session against a plane, in a bubble.
type harness struct {
	*fakeServer
	client *session.Client
	deps   session.Deps
	id     session.Identity
	cancel context.CancelFunc
	done   chan error

	hmu         sync.Mutex
	diagnostics []session.Diagnostic
	diagAt      []time.Time
	dials       []time.Time
	admissions  []int64
	acked       int
	offers      int
}

func start(t *testing.T, p *fakeServer, id session.Identity, change func(*session.Deps, *session.Config)) *harness {
	t.Helper()
	h := &harness{fakeServer: p, id: id, done: make(chan error, 1)}
	h.deps = session.Deps{
		Logger: slog.New(slog.DiscardHandler), Identity: id, Clock: clock.New(0), Roots: p.service.Bundle(),
		Endpoint: func() (string, error) { return "nodeapi:1", nil },
		Record: func(_ context.Context, d session.Diagnostic) (diag.Entry, error) {
			h.hmu.Lock()
			defer h.hmu.Unlock()
			h.diagnostics = append(h.diagnostics, d)
			h.diagAt = append(h.diagAt, time.Now())
			return diag.Entry{}, nil
		},
		Dial: func(ctx context.Context, address string) (net.Conn, error) {
			h.hmu.Lock()
			h.dials = append(h.dials, time.Now())
			h.hmu.Unlock()
			return p.pipe.dial(ctx, address)
		},
		Hooks: session.Hooks{
			Admitted: func(_ context.Context, generation int64) {
				h.hmu.Lock()
				defer h.hmu.Unlock()
				h.admissions = append(h.admissions, generation)
			},
			Acknowledged: func(_ context.Context, refs []*nodev1.TaskRef) error {
				h.hmu.Lock()
				defer h.hmu.Unlock()
				h.acked += len(refs)
				return nil
			},
			Offer: func(*nodev1.TaskOffer) error {
				h.hmu.Lock()
				defer h.hmu.Unlock()
				h.offers++
				return nil
			},
		},
	}
	cfg := session.Config{Backoff: backoff.Policy{Base: time.Second, Cap: 30 * time.Second}}
	if change != nil {
		change(&h.deps, &cfg)
	}
	var err error
	if h.client, err = session.New(h.deps, cfg); err != nil {
		t.Fatal(err)
	}
	var ctx context.Context
	ctx, h.cancel = context.WithCancel(t.Context())
	go func() { h.done <- h.client.Run(ctx) }()
	return h
}

// stop ends the agent and the server, and fails the test on an alarm.
func (h *harness) stop() {
	h.t.Helper()
	h.cancel()
	if err := <-h.done; err != nil {
		h.t.Errorf("Run: %v", err)
	}
	h.fakeServer.end()
}

func (p *fakeServer) end() {
	p.t.Helper()
	p.server.Stop()
	if p.closer != nil {
		p.closer()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, alarm := range p.alarms {
		p.t.Errorf("alarm: %s", alarm)
	}
}

func (h *harness) until(what string, within time.Duration, done func() bool) {
	h.t.Helper()
	for end := time.Now().Add(within); ; {
		synctest.Wait()
		if done() {
			return
		}
		if time.Now().After(end) {
			h.fail(what, within)
		}
		time.Sleep(max(50*time.Millisecond, within/2000))
	}
}

func (h *harness) admitted() bool { return h.client.Generation() != 0 }

func (p *fakeServer) memory() *memory.Identity {
	return memory.New(identity.Node{NodeID: p.nodeID, InstanceID: ids.New(), TrustDomain: agenttest.TrustDomain},
		p.cert())
}

// disk enrols an identity on disk at the plane.
func (p *fakeServer) disk(dirs identity.Dirs, opts ...identity.Option) *identity.Store {
	p.t.Helper()
	s, err := identity.Open(dirs, opts...)
	if err != nil {
		p.t.Fatal(err)
	}
	if s.Certificate() != nil {
		return s
	}
	key, err := s.PendingKey()
	if err != nil {
		p.t.Fatal(err)
	}
	csr, err := pki.NewAnonymousCSR(key)
	if err != nil {
		p.t.Fatal(err)
	}
	chain, err := p.nodes.SignCSR(csr, p.nodeID, time.Now(), time.Now().Add(p.ttl))
	if err != nil {
		p.t.Fatal(err)
	}
	certs, _ := pki.DecodeCertificates(chain)
	p.current = pki.SerialString(certs[0].SerialNumber)
	if err := s.CommitEnrolment("gbt_token_of_this_test", &recoveryv1.EnrollResponse{
		NodeId: p.nodeID, NodeInstanceId: ids.New(), CertificateChainPem: chain,
		Profile:            &commonv1.Profile{ApiUrl: "nodeapi:1"},
		TaskSigningPubkeys: cmp.Or(p.taskPubkeys, "k1:AAAA"),
	}); err != nil {
		p.t.Fatal(err)
	}
	return s
}

func dirsOf(t *testing.T) identity.Dirs {
	t.Helper()
	root := t.TempDir()
	return identity.Dirs{Etc: filepath.Join(root, "etc"), State: filepath.Join(root, "state")}
}

func (p *fakeServer) opened() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.opens)
}

func (p *fakeServer) session(n int) *visit {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sessions[n]
}

func (p *fakeServer) saw(frame string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for _, f := range p.frames {
		if f == frame {
			n++
		}
	}
	return n
}

func (h *harness) fail(what string, within time.Duration) {
	h.t.Helper()
	h.fakeServer.mu.Lock()
	defer h.fakeServer.mu.Unlock()
	h.hmu.Lock()
	defer h.hmu.Unlock()
	h.t.Fatalf("not within %v: %s (opens %d, frames %q, diagnostics %v)", within, what, len(h.opens), h.frames,
		h.diagnostics)
}
