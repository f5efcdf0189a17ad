package ca_test

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/testkit"
)

// The two forms of the authority must answer alike; the remote one speaks to smallstep's own HTTP handlers here.
func TestRemoteAuthoritySignsAsTheEmbeddedOne(t *testing.T) {
	testkit.IO(t)
	dir := t.TempDir()
	embedded, err := ca.Open(ca.Config{Dir: dir, TrustDomain: td})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := embedded.Close(); err != nil {
			t.Error(err)
		}
	}()
	server := httptest.NewTLSServer(embedded.Handler())
	transport := server.Client().Transport.(*http.Transport).Clone()
	transport.TLSClientConfig.ServerName = "example.com" // what the test server's certificate names
	transport.DialContext = func(ctx context.Context, network, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, server.Listener.Addr().String())
	}
	remote, err := ca.Dial(ca.RemoteConfig{
		URL: "https://ca." + td, ProvisionerPath: filepath.Join(dir, ca.ProvisionerFile), TrustDomain: td,
		Transport: transport,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := remote.Close(); err != nil {
			t.Error(err)
		}
	}()
	csr, err := pki.NewCSR(p256(t), pki.NodeID(td, nodeID))
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // each attempt mints a token of its own
		issued, err := sign(t, remote, csr, time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		certs, err := pki.ParseChain(issued.Chain)
		if err != nil {
			t.Fatal(err)
		}
		fingerprint, err := remote.SigningFingerprint(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if len(certs) != 2 || pki.Fingerprint(certs[1]) != fingerprint {
			t.Errorf("chain of %d, signed by %s", len(certs), fingerprint)
		}
	}
	roots, err := remote.Roots(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	own, err := embedded.Roots(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(roots) != 1 || pki.Fingerprint(roots[0]) != pki.Fingerprint(own[0]) {
		t.Error("the roots differ")
	}
	server.Close()
	if _, err := sign(t, remote, csr, time.Hour); !fault.Has(err,
		commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE) {
		t.Errorf("a dead authority: %v", err)
	}
}
