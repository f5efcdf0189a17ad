package trust

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/trust/canary"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const domain = "mesh.test"

// issuers are the authorities of a mesh.
type issuers struct {
	nodes    *ca.Embedded
	services *ca.ServiceCA
	roots    *pki.Bundle // of services
}

func newIssuers(t *testing.T) *issuers {
	t.Helper()
	services, err := ca.OpenServiceCA(t.TempDir(), domain)
	if err != nil {
		t.Fatal(err)
	}
	roots, err := services.Bundle()
	if err != nil {
		t.Fatal(err)
	}
	return &issuers{nodes: newAuthority(t), services: services, roots: roots}
}

func newAuthority(t *testing.T) *ca.Embedded {
	t.Helper()
	nodes, err := ca.Open(ca.Config{Dir: t.TempDir(), TrustDomain: domain})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = nodes.Close() })
	return nodes
}

func bundleOf(t *testing.T, authority ca.Signer) *pki.Bundle {
	t.Helper()
	roots, err := authority.Roots(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	bundle, err := pki.NewBundle(roots...)
	if err != nil {
		t.Fatal(err)
	}
	return bundle
}

// ingress serves the agents' port: it trusts a bundle, and calls after with each connection that it has accepted.
func (i *issuers) ingress(t *testing.T, trusts *pki.Bundle, after func(net.Conn)) string {
	t.Helper()
	return i.edge(t, trusts, nil, after)
}

// edge is ingress with another policy about certificates of clients than the agents' port has; nil: the same.
func (i *issuers) edge(t *testing.T, trusts *pki.Bundle, policy *tls.ClientAuthType, after func(net.Conn)) string {
	t.Helper()
	store, err := i.services.Issue("nodeapi", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	config, err := pki.ServerTLS(pki.ServerConfig{
		Store: store, TrustDomain: domain, NextProtos: []string{"h2"},
		Clients: []pki.Trust{{Kind: pki.KindNode, Bundle: trusts}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if policy != nil {
		config.ClientAuth, config.VerifyConnection, config.GetConfigForClient = *policy, nil, nil
	}
	return listen(t, func(raw net.Conn) {
		conn := tls.Server(raw, config)
		if conn.HandshakeContext(t.Context()) == nil {
			after(conn)
		}
	})
}

// listen serves each connection by a function, and closes it after.
func listen(t *testing.T, serve func(net.Conn)) string {
	t.Helper()
	inner, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var all sync.WaitGroup
	all.Go(func() {
		for {
			conn, err := inner.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
				defer stop()
				defer conn.Close()
				serve(conn)
			})
		}
	})
	t.Cleanup(func() {
		cancel()
		_ = inner.Close()
		all.Wait()
	})
	return inner.Addr().String()
}

// speaks is a server that sends the first bytes of HTTP/2, and nothing after them.
func speaks(conn net.Conn) {
	_, _ = conn.Write([]byte("\x00\x00\x00\x04\x00\x00\x00\x00\x00"))
	keeps(conn)
}

// page is an edge that answers each request with a page, as one that limits its clients does.
func page(conn net.Conn) {
	_, _ = io.WriteString(conn, "HTTP/1.1 429 Too Many Requests\r\nContent-Length: 5\r\n\r\nslow\n")
}

// refuses is the node API: it refuses the stream of the canary.
func refuses(conn net.Conn) {
	serve(conn, fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "this port serves nodes"))
}

// overloaded is the node API, or an edge that knows our words, with another refusal.
func overloaded(conn net.Conn) { serve(conn, fault.New(commonv1.Reason_REASON_OVERLOADED, "")) }

// stranger is a server of gRPC that knows no service of ours.
func stranger(conn net.Conn) { serve(conn, nil) }

// waits is the node API behind a proxy that waits for its client to speak first.
func waits(conn net.Conn) {
	first := make([]byte, 1)
	if _, err := io.ReadFull(conn, first); err == nil {
		refuses(&replayed{Conn: conn, rest: io.MultiReader(bytes.NewReader(first), conn)})
	}
}

// serve serves gRPC on one connection until it ends, with one answer to all streams; nil: no method is known.
func serve(conn net.Conn, answer *fault.Error) {
	var options []grpc.ServerOption
	if answer != nil {
		options = append(options, grpc.UnknownServiceHandler(func(any, grpc.ServerStream) error {
			return fault.ToGRPC(answer, "")
		}))
	}
	server := grpc.NewServer(options...)
	defer server.Stop()
	one := &single{conn: conn, ended: make(chan struct{})}
	_ = server.Serve(one) // until the connection has ended
}

// single is a listener of one connection.
type single struct {
	conn     net.Conn
	accepted atomic.Bool
	ended    chan struct{}
	end      sync.Once
}

func (s *single) Accept() (net.Conn, error) {
	if !s.accepted.Swap(true) {
		return &closing{Conn: s.conn, of: s}, nil
	}
	<-s.ended
	return nil, net.ErrClosed
}

func (s *single) Addr() net.Addr { return s.conn.LocalAddr() }

func (s *single) Close() error {
	s.end.Do(func() { close(s.ended) })
	return nil
}

// closing is a connection that ends its listener.
type closing struct {
	net.Conn

	of *single
}

func (c *closing) Close() error { return errors.Join(c.Conn.Close(), c.of.Close()) }

// replayed is a connection of which something was read before.
type replayed struct {
	net.Conn

	rest io.Reader
}

func (r *replayed) Read(p []byte) (int, error) { return r.rest.Read(p) }

// keeps is a server that keeps a connection and sends nothing.
func keeps(conn net.Conn) { _, _ = io.Copy(io.Discard, conn) }

// closes is a server that closes a connection at once.
func closes(net.Conn) {}

func TestHandshake(t *testing.T) {
	testkit.IO(t)
	i := newIssuers(t)
	mine, foreign := bundleOf(t, i.nodes), bundleOf(t, newAuthority(t))
	strangers := newIssuers(t)
	with, err := canary.New(t.Context(), i.nodes.Sign, domain, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	gone := listen(t, closes)
	none, each := tls.NoClientCert, tls.RequireAnyClientCert
	const noneAsked, another = "asked for no client certificate", "as the node API"
	for name, test := range map[string]struct {
		address string
		want    recoveryv1.HandshakeOutcome
		text    string // a part of the description
	}{
		"it trusts the issuer":                     {i.ingress(t, mine, refuses), canary.Trusted, "accepted"},
		"it trusts it, and waits for the client":   {i.ingress(t, mine, waits), canary.Trusted, "accepted"},
		"it trusts another":                        {i.ingress(t, foreign, refuses), canary.Refused, "unknown"},
		"it asks for none, and speaks":             {i.edge(t, mine, &none, speaks), canary.Unproven, noneAsked},
		"it asks for none, and answers with pages": {i.edge(t, mine, &none, page), canary.Unproven, noneAsked},
		"it asks for none, and answers as nodeapi": {i.edge(t, mine, &none, refuses), canary.Unproven, noneAsked},
		"it accepts any, and speaks":               {i.edge(t, foreign, &each, speaks), canary.Unproven, another},
		"it accepts any, and answers with pages":   {i.edge(t, foreign, &each, page), canary.Unproven, another},
		"it accepts any, and serves others":        {i.edge(t, foreign, &each, stranger), canary.Unproven, another},
		"it refuses for another reason":            {i.ingress(t, mine, overloaded), canary.Unproven, another},
		"it accepts, and says nothing":             {i.ingress(t, mine, keeps), canary.Unproven, "in time"},
		"it accepts, and closes":                   {i.ingress(t, mine, closes), canary.Unproven, ""},
		"it closes at once":                        {gone, canary.Unproven, ""},
		"it never begins a handshake":              {listen(t, keeps), canary.Unproven, "in time"},
		"it speaks no TLS":                         {listen(t, speaks), canary.Unproven, "failed"},
		"it shows a certificate of another issuer": {strangers.ingress(t, mine, refuses), canary.Unproven, "failed"},
		"nothing listens":                          {"127.0.0.1:1", canary.Unproven, "not reached"},
		"it is no address":                         {"nowhere", canary.Unproven, "not reached"},
	} {
		t.Run(name, func(t *testing.T) {
			got, detail := canary.Handshake(t.Context(), test.address, pki.ClientConfig{
				Store: with.Store, Roots: i.roots, Server: pki.ServiceID(domain, "nodeapi"), NextProtos: []string{"h2"},
			}, 1500*time.Millisecond)
			if got != test.want || !strings.Contains(detail, test.text) {
				t.Errorf("%s: %q, want %s and %q", got, detail, test.want, test.text)
			}
		})
	}
}

// TestOtherAlerts: a server that ends a handshake for something else than the client's certificate proves nothing.
func TestOtherAlerts(t *testing.T) {
	testkit.IO(t)
	i := newIssuers(t)
	with, err := canary.New(t.Context(), i.nodes.Sign, domain, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	store, err := i.services.Issue("nodeapi", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	config, err := pki.ServerTLS(pki.ServerConfig{
		Store: store, TrustDomain: domain, NextProtos: []string{"other"},
		Clients: []pki.Trust{{Kind: pki.KindNode, Bundle: bundleOf(t, i.nodes)}},
	})
	if err != nil {
		t.Fatal(err)
	}
	address := listen(t, func(raw net.Conn) { _ = tls.Server(raw, config).HandshakeContext(t.Context()) })
	got, detail := canary.Handshake(t.Context(), address, pki.ClientConfig{
		Store: with.Store, Roots: i.roots, Server: pki.ServiceID(domain, "nodeapi"), NextProtos: []string{"h2"},
	}, 1500*time.Millisecond)
	if got != canary.Unproven {
		t.Errorf("%s: %q", got, detail)
	}
}

// TestTheAnnouncedAddressIsReadAsAgentsDo: agents are told a URL of a proxy, whose certificate is of an authority that
// the profile names and services do not trust.
func TestTheAnnouncedAddressIsReadAsAgentsDo(t *testing.T) {
	i, proxies := newIssuers(t), newIssuers(t)
	address := (&issuers{services: proxies.services}).ingress(t, bundleOf(t, i.nodes), refuses)
	with, err := canary.New(t.Context(), i.nodes.Sign, domain, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	p := &Preflight{cfg: defaults, deps: Deps{
		TrustDomain: domain, Services: i.roots, Address: func() string { return "https://" + address + "/" },
	}}
	for _, published := range []func() *pki.Bundle{
		func() *pki.Bundle { return proxies.roots }, nil, func() *pki.Bundle { return nil },
	} {
		p.deps.AgentRoots = published
		c := &check{at: time.Now(), targets: targetsOf(p.agentAddress(), nil, nil)}
		p.shake(t.Context(), c, with)
		want := canary.Trusted
		if p.agentRoots() == i.roots {
			want = canary.Unproven
		}
		if got := c.targets[0]; got.address != address || got.outcome != want {
			t.Errorf("%s: %s, %s; want %s", got.address, got.outcome, got.detail, want)
		}
	}
}
