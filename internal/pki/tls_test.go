package pki_test

import (
	"context"
	"crypto"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"log/slog"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/testkit"
)

const td = "mesh.test"

// authority signs any certificate that a test requests, unlike the real ones.
type authority struct {
	cert *x509.Certificate
	key  crypto.Signer
}

func newAuthority(t *testing.T, name string) authority {
	t.Helper()
	key := newKey(t)
	cert := signed(t, &x509.Certificate{
		Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}, nil, key.Public(), key)
	return authority{cert: cert, key: key}
}

func (a authority) bundle(t *testing.T) *pki.Bundle {
	t.Helper()
	bundle, err := pki.NewBundle(a.cert)
	if err != nil {
		t.Fatal(err)
	}
	return bundle
}

// issue signs a leaf; edit changes it from a good certificate of id.
func (a authority) issue(t *testing.T, id pki.ID, edit func(*x509.Certificate)) *pki.Store {
	t.Helper()
	key := newKey(t)
	template := &x509.Certificate{
		KeyUsage: x509.KeyUsageDigitalSignature, BasicConstraintsValid: true,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}, URIs: []*url.URL{id.URL()},
	}
	if id.Kind == pki.KindNode {
		template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	}
	if edit != nil {
		edit(template)
	}
	cert := signed(t, template, a.cert, key.Public(), a.key)
	store, err := pki.NewStore(key, [][]byte{cert.Raw})
	if err != nil {
		t.Fatal(err)
	}
	return store
}

func newKey(t *testing.T) crypto.Signer {
	t.Helper()
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func signed(t *testing.T, template, issuer *x509.Certificate, public crypto.PublicKey,
	key crypto.Signer,
) *x509.Certificate {
	t.Helper()
	template.SerialNumber = big.NewInt(time.Now().UnixNano())
	if template.NotBefore.IsZero() {
		template.NotBefore = time.Now().Add(-time.Minute)
	}
	if template.NotAfter.IsZero() {
		template.NotAfter = time.Now().Add(time.Hour)
	}
	if issuer == nil {
		issuer = template
	}
	der, err := x509.CreateCertificate(rand.Reader, template, issuer, public, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

// port is a running listener that reports its peer, or why the handshake failed.
type port struct {
	addr    string
	peers   chan pki.Peer
	rejects chan pki.Reject
}

func serve(t *testing.T, cfg pki.ServerConfig) port {
	t.Helper()
	return serveWithin(t, cfg, time.Minute)
}

// serveWithin serves with the given handshake timeout.
func serveWithin(t *testing.T, cfg pki.ServerConfig, handshake time.Duration) port {
	t.Helper()
	tlsConfig, err := pki.ServerTLS(cfg)
	if err != nil {
		t.Fatal(err)
	}
	inner, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := port{addr: inner.Addr().String(), peers: make(chan pki.Peer, 16), rejects: make(chan pki.Reject, 16)}
	listener, err := pki.NewListener(t.Context(), inner, pki.ListenerConfig{
		TLS: tlsConfig, HandshakeTimeout: handshake, OnReject: func(r pki.Reject) { p.rejects <- r },
	})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			state := conn.(*tls.Conn).ConnectionState()
			peer, err := pki.PeerFromState(&state, cfg.TrustDomain)
			if err != nil {
				peer = pki.Peer{}
			}
			p.peers <- peer
			if err := conn.Close(); err != nil {
				t.Log(err)
			}
		}
	}()
	t.Cleanup(func() {
		if err := listener.Close(); err != nil {
			t.Error(err)
		}
		<-done
	})
	return p
}

// dial makes a handshake and waits for the server's answer. A refusal arrives on the first read.
func dial(t *testing.T, addr string, cfg *tls.Config) error {
	t.Helper()
	conn, err := (&tls.Dialer{Config: cfg}).DialContext(t.Context(), "tcp", addr)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }() // the server may have closed it
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 1)); err != nil && errors.Is(err, os.ErrDeadlineExceeded) {
		return err
	}
	return nil
}

// Scenarios: A02, A04, A05.
func TestServerLetsInOnlyWhomItsAuthoritiesName(t *testing.T) {
	testkit.IO(t)
	nodes, services, stranger := newAuthority(t, "nodes"), newAuthority(t, "services"), newAuthority(t, "stranger")
	server := services.issue(t, pki.ServiceID(td, "nodeapi"), nil)
	agentPort := serve(t, pki.ServerConfig{
		Store: server, TrustDomain: td,
		Clients: []pki.Trust{{Kind: pki.KindNode, Bundle: nodes.bundle(t)}},
	})
	internalPort := serve(t, pki.ServerConfig{
		Store: server, TrustDomain: td, Clients: []pki.Trust{{Kind: pki.KindService, Bundle: services.bundle(t)}},
	})
	mixedPort := serve(t, pki.ServerConfig{Store: server, TrustDomain: td, Clients: []pki.Trust{
		{Kind: pki.KindNode, Bundle: nodes.bundle(t)}, {Kind: pki.KindService, Bundle: services.bundle(t)},
	}})
	a, b := pki.NodeID(td, "node-a"), pki.NodeID(td, "node-b")
	svc := pki.ServiceID(td, "recovery")
	tests := []struct {
		name   string
		port   port
		store  *pki.Store
		reject pki.RejectReason // empty: let in
		want   pki.ID
	}{
		{"a node", agentPort, nodes.issue(t, a, nil), "", a},
		{
			"common name of another node", agentPort,
			nodes.issue(t, a, func(c *x509.Certificate) { c.Subject.CommonName = b.Name }), "", a,
		},
		{"a service on the internal port", internalPort, services.issue(t, svc, nil), "", svc},
		{"a node on the mixed port", mixedPort, nodes.issue(t, a, nil), "", a},
		{"a service on the mixed port", mixedPort, services.issue(t, svc, nil), "", svc},
		{"no certificate", agentPort, nil, pki.RejectNoCertificate, pki.ID{}},
		{"another authority", agentPort, stranger.issue(t, a, nil), pki.RejectUnknownAuthority, pki.ID{}},
		{"a service on the agent port", agentPort, services.issue(t, svc, nil), pki.RejectUnknownAuthority, pki.ID{}},
		{"a node on the internal port", internalPort, nodes.issue(t, a, nil), pki.RejectUnknownAuthority, pki.ID{}},
		{"the node authority names a service", mixedPort, nodes.issue(t, svc, nil), pki.RejectWrongKind, pki.ID{}},
		{"the service authority names a node", mixedPort, services.issue(t, a, nil), pki.RejectWrongKind, pki.ID{}},
		{
			"the node authority names a service, agent port", agentPort, nodes.issue(t, svc, nil), pki.RejectWrongKind,
			pki.ID{},
		},
		{"expired", agentPort, nodes.issue(t, a, func(c *x509.Certificate) {
			c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(-time.Second)
		}), pki.RejectExpired, pki.ID{}},
		{"not yet valid", agentPort, nodes.issue(t, a,
			func(c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Minute) }), pki.RejectNotYetValid, pki.ID{}},
		{"server authentication only", agentPort, nodes.issue(t, a, func(c *x509.Certificate) {
			c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
		}), pki.RejectWrongUsage, pki.ID{}},
		{
			"no usage at all", agentPort, nodes.issue(t, a, func(c *x509.Certificate) { c.ExtKeyUsage = nil }),
			pki.RejectWrongUsage,
			pki.ID{},
		},
		{"any usage", agentPort, nodes.issue(t, a, func(c *x509.Certificate) {
			c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageAny}
		}), pki.RejectWrongUsage, pki.ID{}},
		{
			"two names", agentPort, nodes.issue(t, a, func(c *x509.Certificate) { c.URIs = append(c.URIs, b.URL()) }),
			pki.RejectIdentity,
			pki.ID{},
		},
		{"no name", agentPort, nodes.issue(t, a, func(c *x509.Certificate) { c.URIs = nil }), pki.RejectIdentity, pki.ID{}},
		{
			"a name and a host name", agentPort, nodes.issue(t, a, func(c *x509.Certificate) { c.DNSNames = []string{"x"} }),
			pki.RejectIdentity,
			pki.ID{},
		},
		{
			"another trust domain", agentPort, nodes.issue(t, pki.NodeID("other.test", "node-a"), nil), pki.RejectIdentity,
			pki.ID{},
		},
		{
			"an authority as a leaf", agentPort, nodes.issue(t, a, func(c *x509.Certificate) { c.IsCA = true }),
			pki.RejectIdentity,
			pki.ID{},
		},
		{"may sign certificates", agentPort, nodes.issue(t, a, func(c *x509.Certificate) {
			c.IsCA = true
			c.KeyUsage |= x509.KeyUsageCertSign
		}), pki.RejectIdentity, pki.ID{}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cfg, err := pki.ClientTLS(pki.ClientConfig{
				Store: tt.store, Roots: services.bundle(t),
				Server: pki.ServiceID(td, "nodeapi"),
			})
			if err != nil {
				t.Fatal(err)
			}
			if err := dial(t, tt.port.addr, cfg); err != nil {
				t.Fatal(err)
			}
			select {
			case peer := <-tt.port.peers:
				if tt.reject != "" || peer.ID != tt.want {
					t.Errorf("let in as %v, wanted %q", peer.ID, tt.reject)
				}
			case got := <-tt.port.rejects:
				if got.Reason != tt.reject {
					t.Errorf("refused as %q (%v), wanted %q", got.Reason, got.Err, tt.reject)
				}
				if tt.store != nil && len(tt.store.Certificate().Leaf.URIs) > 0 && got.Claimed.SAN == "" {
					t.Error("the claimed name is lost")
				}
			}
		})
	}
}

// Scenario: A17.
func TestOnlyTLS13AndNoResumption(t *testing.T) {
	testkit.IO(t)
	nodes, services := newAuthority(t, "nodes"), newAuthority(t, "services")
	roots := nodes.bundle(t)
	p := serve(t, pki.ServerConfig{
		Store: services.issue(t, pki.ServiceID(td, "nodeapi"), nil), TrustDomain: td,
		Clients: []pki.Trust{{Kind: pki.KindNode, Bundle: roots}},
	})
	store := nodes.issue(t, pki.NodeID(td, "node-a"), nil)
	client := func() *tls.Config {
		cfg, err := pki.ClientTLS(pki.ClientConfig{
			Store: store, Roots: services.bundle(t),
			Server: pki.ServiceID(td, "nodeapi"),
		})
		if err != nil {
			t.Fatal(err)
		}
		return cfg
	}
	old := client()
	old.MinVersion, old.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
	if err := dial(t, p.addr, old); err == nil {
		t.Error("TLS 1.2 was let in")
	}
	if got := <-p.rejects; got.Reason != pki.RejectProtocol {
		t.Errorf("TLS 1.2: %q", got.Reason)
	}
	// A client that would like to resume never gets a ticket, so a changed bundle counts from the next connection on.
	eager := client()
	eager.ClientSessionCache = tls.NewLRUClientSessionCache(8)
	eager.ServerName = "nodeapi"
	for range 2 {
		conn, err := (&tls.Dialer{Config: eager}).DialContext(t.Context(), "tcp", p.addr)
		if err != nil {
			t.Fatal(err)
		}
		if conn.(*tls.Conn).ConnectionState().DidResume {
			t.Error("a session was resumed")
		}
		<-p.peers
		_, _ = conn.Read(make([]byte, 1)) // until the server is done
		_ = conn.Close()
	}
	if err := roots.Set(newAuthority(t, "next").cert); err != nil {
		t.Fatal(err)
	}
	if err := dial(t, p.addr, eager); err != nil {
		t.Fatal(err)
	}
	if got := <-p.rejects; got.Reason != pki.RejectUnknownAuthority {
		t.Errorf("after the bundle changed: %q", got.Reason)
	}
}

// Scenario: D03.
func TestSilentAndForeignClientsAreCutOff(t *testing.T) {
	testkit.IO(t)
	nodes, services := newAuthority(t, "nodes"), newAuthority(t, "services")
	cfg := pki.ServerConfig{
		Store: services.issue(t, pki.ServiceID(td, "nodeapi"), nil), TrustDomain: td,
		Clients: []pki.Trust{{Kind: pki.KindNode, Bundle: nodes.bundle(t)}},
	}
	tests := []struct {
		name   string
		say    string
		within time.Duration
		want   pki.RejectReason
	}{
		{"silent", "", 500 * time.Millisecond, pki.RejectTimeout},
		{"plain text", "GET / HTTP/1.1\r\nHost: x\r\n\r\n", time.Minute, pki.RejectProtocol},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := serveWithin(t, cfg, tt.within)
			conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", p.addr)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = conn.Close() }()
			if _, err := conn.Write([]byte(tt.say)); err != nil {
				t.Fatal(err)
			}
			if got := <-p.rejects; got.Reason != tt.want {
				t.Errorf("refused as %q (%v), wanted %q", got.Reason, got.Err, tt.want)
			}
		})
	}
}

func TestClientRefusesEveryServerButTheExpected(t *testing.T) {
	testkit.IO(t)
	services, stranger := newAuthority(t, "services"), newAuthority(t, "stranger")
	want := pki.ServiceID(td, "nodeapi")
	tests := []struct {
		name  string
		store *pki.Store
		ok    bool
	}{
		{"the expected", services.issue(t, want, nil), true},
		{"another service", services.issue(t, pki.ServiceID(td, "recovery"), nil), false},
		{"a node of that name", services.issue(t, pki.NodeID(td, "nodeapi"), nil), false},
		{"another trust domain", services.issue(t, pki.ServiceID("other.test", "nodeapi"), nil), false},
		{"another authority", stranger.issue(t, want, nil), false},
		{"client authentication only", services.issue(t, want, func(c *x509.Certificate) {
			c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
		}), false},
		{"expired", services.issue(t, want, func(c *x509.Certificate) {
			c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(-time.Second)
		}), false},
		{"host name only", services.issue(t, want,
			func(c *x509.Certificate) { c.URIs, c.DNSNames = nil, []string{"nodeapi"} }), false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := serve(t, pki.ServerConfig{Store: tt.store, TrustDomain: td})
			cfg, err := pki.ClientTLS(pki.ClientConfig{Roots: services.bundle(t), Server: want})
			if err != nil {
				t.Fatal(err)
			}
			if err := dial(t, p.addr, cfg); (err == nil) != tt.ok {
				t.Errorf("err = %v", err)
			}
		})
	}
}

func TestFilesAreReloadedAndBadOnesAreNot(t *testing.T) {
	dir := t.TempDir()
	path, caPath := filepath.Join(dir, pki.IdentityFile), filepath.Join(dir, pki.BundleFile)
	services := newAuthority(t, "services")
	write := func() string {
		t.Helper()
		cert := services.issue(t, pki.ServiceID(td, "nodeapi"), nil).Certificate()
		if err := pki.WriteIdentity(path, cert.PrivateKey.(crypto.Signer), cert.Certificate); err != nil {
			t.Fatal(err)
		}
		return pki.Fingerprint(cert.Leaf)
	}
	first := write()
	if err := pki.WriteFile(caPath, pki.EncodeCertificates([]*x509.Certificate{services.cert})); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v", info.Mode())
	}
	store, err := pki.LoadStore(path, path)
	if err != nil {
		t.Fatal(err)
	}
	bundle, err := pki.LoadBundle(caPath)
	if err != nil {
		t.Fatal(err)
	}
	if changed, err := store.Reload(); changed || err != nil {
		t.Errorf("reload of the same: %v, %v", changed, err)
	}
	second := write()
	if changed, err := store.Reload(); !changed || err != nil {
		t.Errorf("reload of the next: %v, %v", changed, err)
	}
	if got := pki.Fingerprint(store.Certificate().Leaf); got != second || got == first {
		t.Errorf("shown is %s", got)
	}
	for _, bad := range []string{"", "garbage", string(bundle.PEM())} {
		if err := pki.WriteFile(path, []byte(bad)); err != nil {
			t.Fatal(err)
		}
		if _, err := store.Reload(); err == nil {
			t.Errorf("%q was loaded", bad)
		}
	}
	if got := pki.Fingerprint(store.Certificate().Leaf); got != second {
		t.Error("a bad file replaced a good certificate")
	}
	if err := pki.WriteFile(caPath, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := bundle.Reload(); err == nil || len(bundle.Roots()) != 1 {
		t.Error("an empty bundle replaced a good one")
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != 2 {
		t.Errorf("temporary files were left: %v", entries)
	}
}

func TestWatchReloads(t *testing.T) {
	services := newAuthority(t, "services")
	path := filepath.Join(t.TempDir(), pki.BundleFile)
	if err := pki.WriteFile(path, pki.EncodeCertificates([]*x509.Certificate{services.cert})); err != nil {
		t.Fatal(err)
	}
	bundle, err := pki.LoadBundle(path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	watched := make(chan struct{})
	go func() {
		done <- pki.Watch(ctx, slog.New(slog.DiscardHandler), time.Millisecond, bundle, reloaderFunc(func() (bool, error) {
			if len(bundle.Roots()) == 2 {
				select {
				case watched <- struct{}{}:
				default:
				}
			}
			return false, errors.New("a failure of one does not stop the others")
		}))
	}()
	next := newAuthority(t, "next")
	if err := pki.WriteFile(path, pki.EncodeCertificates([]*x509.Certificate{services.cert, next.cert})); err != nil {
		t.Fatal(err)
	}
	<-watched
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

type reloaderFunc func() (bool, error)

func (f reloaderFunc) Reload() (bool, error) { return f() }

// TestConnectionsShareTheirConfiguration checks that connections share their configuration until a bundle changes.
func TestConnectionsShareTheirConfiguration(t *testing.T) {
	t.Parallel()
	services, nodes := newAuthority(t, "services"), newAuthority(t, "nodes")
	cert := services.issue(t, pki.ServiceID(td, "nodeapi"), nil).Certificate()
	path := filepath.Join(t.TempDir(), pki.IdentityFile)
	if err := pki.WriteIdentity(path, cert.PrivateKey.(crypto.Signer), cert.Certificate); err != nil {
		t.Fatal(err)
	}
	store, err := pki.LoadStore(path, path)
	if err != nil {
		t.Fatal(err)
	}
	trusted := &pki.Bundle{}
	if err := trusted.Set(nodes.cert); err != nil {
		t.Fatal(err)
	}
	conf, err := pki.ServerTLS(pki.ServerConfig{
		Store: store, TrustDomain: td, Clients: []pki.Trust{{Kind: pki.KindNode, Bundle: trusted}},
	})
	if err != nil {
		t.Fatal(err)
	}
	next := func() *tls.Config {
		t.Helper()
		c, err := conf.GetConfigForClient(nil)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	first := next()
	if second := next(); second != first {
		t.Error("the second connection has a configuration of its own")
	}
	if err := trusted.Set(nodes.cert, services.cert); err != nil {
		t.Fatal(err)
	}
	after := next()
	if after == first || !after.ClientCAs.Equal(trusted.Pool()) {
		t.Error("a connection after the bundle has changed trusts what it held before")
	}
}

// TestAnExpiredIssuerIsNoExpiredNode: a node's certificate is good, and that of the intermediate or root above it has
// expired, or is not valid yet.
func TestAnExpiredIssuerIsNoExpiredNode(t *testing.T) {
	node := pki.NodeID(td, "node-a")
	for name, life := range map[string][2]time.Duration{
		"expired": {-time.Hour, -time.Second}, "not yet valid": {time.Minute, time.Hour},
	} {
		for _, intermediate := range []bool{true, false} {
			root, issuer := newAuthority(t, "root"), authority{key: newKey(t)}
			above, key := root.cert, root.key
			if !intermediate {
				above, key = nil, issuer.key
			}
			issuer.cert = signed(t, &x509.Certificate{
				Subject: pkix.Name{CommonName: "issuer"}, IsCA: true, BasicConstraintsValid: true,
				KeyUsage: x509.KeyUsageCertSign, NotBefore: time.Now().Add(life[0]), NotAfter: time.Now().Add(life[1]),
			}, above, issuer.key.Public(), key)
			leaf := signed(t, &x509.Certificate{
				KeyUsage: x509.KeyUsageDigitalSignature, BasicConstraintsValid: true,
				ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, URIs: []*url.URL{node.URL()},
			}, issuer.cert, newKey(t).Public(), issuer.key)
			roots, presented := x509.NewCertPool(), []*x509.Certificate{leaf, issuer.cert}
			roots.AddCert(root.cert)
			if !intermediate {
				roots.AddCert(issuer.cert)
			}
			pool := x509.NewCertPool()
			pool.AddCert(issuer.cert)
			_, err := leaf.Verify(x509.VerifyOptions{
				Roots: roots, Intermediates: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
			})
			got := pki.ClassifyHandshake(
				&tls.CertificateVerificationError{UnverifiedCertificates: presented, Err: err}, time.Now())
			if got.Reason != pki.RejectUnknownAuthority {
				t.Errorf("%s, intermediate %t: %s (%v)", name, intermediate, got.Reason, err)
			}
		}
	}
}
