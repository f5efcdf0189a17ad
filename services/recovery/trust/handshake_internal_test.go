package trust

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
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

// speaks is a server that sends the first bytes of its protocol.
func speaks(conn net.Conn) { _, _ = conn.Write([]byte("\x00\x00\x00\x04\x00\x00\x00\x00\x00")) }

// answers is a server that waits for its client to speak first.
func answers(conn net.Conn) {
	if _, err := io.ReadFull(conn, make([]byte, len(canary.Preface))); err == nil {
		speaks(conn)
	}
}

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
	for name, test := range map[string]struct {
		address string
		want    recoveryv1.HandshakeOutcome
	}{
		"it trusts the issuer":                     {i.ingress(t, mine, speaks), canary.Trusted},
		"it trusts it, and waits for the client":   {i.ingress(t, mine, answers), canary.Trusted},
		"it trusts another":                        {i.ingress(t, foreign, speaks), canary.Refused},
		"it accepts, and says nothing":             {i.ingress(t, mine, keeps), canary.Unproven},
		"it accepts, and closes":                   {i.ingress(t, mine, closes), canary.Unproven},
		"it closes at once":                        {gone, canary.Unproven},
		"it never begins a handshake":              {listen(t, keeps), canary.Unproven},
		"it speaks no TLS":                         {listen(t, speaks), canary.Unproven},
		"it shows a certificate of another issuer": {strangers.ingress(t, mine, speaks), canary.Unproven},
		"nothing listens":                          {"127.0.0.1:1", canary.Unproven},
		"it is no address":                         {"nowhere", canary.Unproven},
	} {
		t.Run(name, func(t *testing.T) {
			got, detail := canary.Handshake(t.Context(), test.address, pki.ClientConfig{
				Store: with.Store, Roots: i.roots, Server: pki.ServiceID(domain, "nodeapi"), NextProtos: []string{"h2"},
			}, 1500*time.Millisecond)
			if got != test.want || detail == "" {
				t.Errorf("%s: %q, want %s", got, detail, test.want)
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

// TestTheToldAddressIsReadAsAgentsDo: agents are told a URL of a proxy, whose certificate is of an authority that the
// profile names and services do not trust.
func TestTheToldAddressIsReadAsAgentsDo(t *testing.T) {
	i, proxies := newIssuers(t), newIssuers(t)
	address := (&issuers{services: proxies.services}).ingress(t, bundleOf(t, i.nodes), speaks)
	with, err := canary.New(t.Context(), i.nodes.Sign, domain, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	p := &Preflight{cfg: defaults, deps: Deps{
		TrustDomain: domain, Services: i.roots, Address: func() string { return "https://" + address + "/" },
	}}
	for _, told := range []func() *pki.Bundle{
		func() *pki.Bundle { return proxies.roots }, nil, func() *pki.Bundle { return nil },
	} {
		p.deps.Told = told
		c := &check{at: time.Now(), targets: targetsOf(p.told(), nil, nil)}
		p.shake(t.Context(), c, with)
		want := canary.Trusted
		if p.toldRoots() == i.roots {
			want = canary.Unproven
		}
		if got := c.targets[0]; got.address != address || got.outcome != want {
			t.Errorf("%s: %s, %s; want %s", got.address, got.outcome, got.detail, want)
		}
	}
}
