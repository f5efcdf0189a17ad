package edge_test

import (
	"crypto/tls"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpuaas/mesh/drill/kit/edge"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/material"
)

const domain = "edge.test"

// TestAnEdgeDecidesAboutEachPath checks that one path is limited, one gets a page, and the others are passed on.
func TestAnEdgeDecidesAboutEachPath(t *testing.T) {
	testkit.IO(t)
	m, err := material.Make(material.Config{Dir: filepath.Join(t.TempDir(), "material"), TrustDomain: domain})
	if err != nil {
		t.Fatal(err)
	}
	identity := m.Identity(material.Recovery)
	store, err := pki.LoadStore(identity, identity)
	if err != nil {
		t.Fatal(err)
	}
	behind := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "behind "+r.URL.Path)
	}))
	if behind.TLS, err = pki.ServerTLS(pki.ServerConfig{Store: store, TrustDomain: domain}); err != nil {
		t.Fatal(err)
	}
	behind.TLS.Certificates = []tls.Certificate{*store.Certificate()} // httptest would show its own
	behind.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	behind.StartTLS()
	t.Cleanup(behind.Close)
	e, err := edge.Start(t.Context(), edge.Config{
		Identity: identity, Roots: m.ServiceRoots(), TrustDomain: domain, Service: material.Recovery,
		Upstreams: []string{behind.Listener.Addr().String()},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	roots, err := pki.LoadBundle(m.ServiceRoots())
	if err != nil {
		t.Fatal(err)
	}
	conf, err := pki.ClientTLS(pki.ClientConfig{Roots: roots, Server: pki.ServiceID(domain, material.Recovery)})
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{TLSClientConfig: conf, ForceAttemptHTTP2: true}
	t.Cleanup(transport.CloseIdleConnections)
	client := &http.Client{Transport: transport, Timeout: time.Minute}
	expect := func(path string, status int, retry, body string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+e.Addr()+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		defer resp.Body.Close()
		got, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != status || resp.Header.Get("Retry-After") != retry ||
			(body != "" && string(got) != body) {
			t.Errorf("%s: %d, retry after %q, %q, %v", path, resp.StatusCode, resp.Header.Get("Retry-After"), got, err)
		}
	}
	e.Set("/limited", edge.Limited(7*time.Second))
	e.Set("/limited/not", edge.Answer{})
	e.Set("/page", edge.Page())
	expect("/limited/x", http.StatusTooManyRequests, "7", "")
	expect("/limited/not", http.StatusOK, "", "behind /limited/not")
	expect("/page", http.StatusOK, "", "<html><body>OK</body></html>")
	expect("/other", http.StatusOK, "", "behind /other")
	e.Set("", edge.Limited(0))
	expect("/other", http.StatusTooManyRequests, "", "")
	got := e.Requests()
	if len(got) != 5 || got[0].Path != "/limited/x" || got[0].Answer.Status != http.StatusTooManyRequests ||
		got[1].Answer.Status != 0 {
		t.Errorf("requests %v", got)
	}
}
