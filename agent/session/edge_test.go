package session_test

import (
	"context"
	"crypto/tls"
	"io"
	"log/slog"
	"net"
	"net/http"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/mesh/agent/agenttest"
	"github.com/gpuaas/mesh/agent/session"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/pki"
)

// TestWhatKeepsItAway checks that each cause is recorded under its own code, by which an operator acts.
func TestWhatKeepsItAway(t *testing.T) {
	tests := []struct {
		name   string
		server func(p *fakeServer)
		deps   func(p *fakeServer, d *session.Deps)
		code   commonv1.DiagnosticCode
		fewest time.Duration // between two dials
	}{
		{
			name: "server of another authority", code: commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SERVER_TLS_UNTRUSTED,
			deps: func(p *fakeServer, d *session.Deps) {
				other, err := agenttest.NewAuthority("another", time.Now())
				if err != nil {
					p.t.Fatal(err)
				}
				d.Roots = other.Bundle()
			},
		},
		{
			name: "another service", code: commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SERVER_NAME_MISMATCH,
			server: func(p *fakeServer) {
				p.server.Stop()
				p.pipe = newPipe()
				p.serve("lifecycle")
			},
		},
		{
			name: "our certificate is refused", code: commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SESSION_REFUSED,
			server: func(p *fakeServer) {
				p.server.Stop()
				p.pipe = newPipe()
				nodes, err := agenttest.NewAuthority("another", time.Now())
				if err != nil {
					p.t.Fatal(err)
				}
				p.nodes, nodes = nodes, p.nodes
				p.serve("nodeapi")
				p.nodes = nodes
			},
		},
		{
			name: "name not resolved", code: commonv1.DiagnosticCode_DIAGNOSTIC_CODE_NAME_RESOLUTION_FAILED,
			deps: func(_ *fakeServer, d *session.Deps) {
				d.Dial = func(context.Context, string) (net.Conn, error) {
					return nil, &net.OpError{Op: "dial", Err: &net.DNSError{Err: "no such host", Name: "nodeapi", IsNotFound: true}}
				}
			},
		},
		{
			name: "refused", code: commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CONNECTION_REFUSED,
			deps: func(_ *fakeServer, d *session.Deps) {
				d.Dial = func(context.Context, string) (net.Conn, error) {
					return nil, &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
				}
			},
		},
		{
			name: "a limit of an edge", code: commonv1.DiagnosticCode_DIAGNOSTIC_CODE_EDGE_RATE_LIMITED,
			server: func(p *fakeServer) { p.page(http.StatusTooManyRequests) }, fewest: 30 * time.Second,
		},
		{
			name: "a limit of an edge for a time", code: commonv1.DiagnosticCode_DIAGNOSTIC_CODE_EDGE_RATE_LIMITED,
			server: func(p *fakeServer) { p.page(http.StatusTooManyRequests, "Retry-After", "100") }, fewest: 100 * time.Second,
		},
		{
			name: "a page of an edge", code: commonv1.DiagnosticCode_DIAGNOSTIC_CODE_EDGE_RATE_LIMITED,
			server: func(p *fakeServer) { p.page(http.StatusOK) },
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newFakeServer(t)
				m := p.memory()
				if tt.server != nil {
					tt.server(p)
				}
				h := start(t, p, m, func(d *session.Deps, c *session.Config) {
					c.RefusedFor = time.Hour // Run does not end meanwhile
					if tt.deps != nil {
						tt.deps(p, d)
					}
				})
				time.Sleep(5 * time.Minute)
				h.stop()
				if len(h.diagnostics) < 2 {
					t.Fatalf("%d diagnostics", len(h.diagnostics))
				}
				for _, d := range h.diagnostics[:2] {
					if d.Code != tt.code {
						t.Errorf("code %v: %s", d.Code, d.Detail)
					}
				}
				for i := 1; i < len(h.dials); i++ {
					if wait := h.dials[i].Sub(h.dials[i-1]); wait < tt.fewest {
						t.Errorf("dial %d after %v", i, wait)
					}
				}
				if p.opened() != 0 {
					t.Error("a session was opened")
				}
			})
		})
	}
}

// page serves an edge's response, in the control plane's place and with its certificate.
func (p *fakeServer) page(status int, header ...string) {
	p.server.Stop()
	p.pipe = newPipe()
	pair, err := p.service.Pair(pki.ServiceID(agenttest.TrustDomain, "nodeapi"), time.Now().Add(-time.Hour),
		time.Now().Add(100*time.Hour))
	if err != nil {
		p.t.Fatal(err)
	}
	server := &http.Server{
		TLSConfig: &tls.Config{
			MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{*pair},
			NextProtos: []string{"h2"},
		},
		ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0), ReadHeaderTimeout: time.Second,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/html; charset=utf-8")
			for i := 0; i < len(header); i += 2 {
				w.Header().Set(header[i], header[i+1])
			}
			w.WriteHeader(status)
			_, _ = io.WriteString(w, "<html>please wait</html>")
		}),
	}
	listener := p.pipe
	go func() { _ = server.ServeTLS(listener, "", "") }()
	p.closer = func() { _ = server.Close(); _ = listener.Close() }
}
