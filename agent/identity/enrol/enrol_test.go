package enrol_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/mesh/agent/agenttest"
	"github.com/gpuaas/mesh/agent/clock"
	"github.com/gpuaas/mesh/agent/diag"
	"github.com/gpuaas/mesh/agent/identity"
	"github.com/gpuaas/mesh/agent/identity/enrol"
	"github.com/gpuaas/mesh/agent/identity/envfile"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pki"
)

const token = "gbt_0123456789abcdef0123456789abcdef_canary-secret"

type pipe struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func (p *pipe) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}
func (p *pipe) Close() error   { p.once.Do(func() { close(p.done) }); return nil }
func (p *pipe) Addr() net.Addr { return &net.UnixAddr{Name: "pipe"} }
func (p *pipe) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	select {
	case p.conns <- theirs:
		return ours, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// listener is an enrolment listener: one effect per key.
type listener struct {
	t        *testing.T
	services *agenttest.Authority
	nodes    *agenttest.Authority
	pipe     *pipe
	server   *http.Server
	nodeID   string

	mu    sync.Mutex
	calls []time.Time
	keys  map[string]bool

	requests []*recoveryv1.EnrollRequest
	handler  http.Handler // instead of the service
	answer   func(n int, ok *recoveryv1.EnrollResponse) (*recoveryv1.EnrollResponse, error)
}

func (l *listener) Enroll(_ context.Context, request *recoveryv1.EnrollRequest) (*recoveryv1.EnrollResponse, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if request.GetTokenMissing() != nil {
		l.requests = append(l.requests, request)
		_, err := l.answer(len(l.requests), nil)
		return nil, err
	}
	if request.GetToken() != token && !envfile.IsRecoveryToken(request.GetToken()) {
		l.t.Errorf("token %q", request.GetToken())
	}
	l.requests = append(l.requests, request)
	csr, err := x509.ParseCertificateRequest(request.GetCsr())
	if err != nil {
		return nil, err
	}
	l.keys[string(csr.RawSubjectPublicKeyInfo)] = true
	chain, err := l.nodes.SignCSR(request.GetCsr(), l.nodeID, time.Now(), time.Now().Add(time.Hour))
	if err != nil {
		return nil, err
	}
	ok := &recoveryv1.EnrollResponse{
		NodeId: l.nodeID, NodeInstanceId: l.nodeID, CertificateChainPem: chain, ServerTime: timestamppb.Now(),
		Profile: &commonv1.Profile{ApiUrl: "nodeapi:1", CaBundlePem: l.services.PEM()},
	}
	n := len(l.calls)
	l.calls = append(l.calls, time.Now())
	if l.answer != nil {
		return l.answer(n, ok)
	}
	return ok, nil
}

type host struct {
	*listener
	dirs  identity.Dirs
	store *identity.Store
	log   *bytes.Buffer
	dial  func(ctx context.Context, network, address string) (net.Conn, error)
	codes []commonv1.DiagnosticCode
	at    []time.Time
}

func newHost(t *testing.T, serverName string, foreign bool) *host {
	t.Helper()
	l := &listener{
		t: t, pipe: &pipe{conns: make(chan net.Conn), done: make(chan struct{})}, nodeID: ids.New(),
		keys: map[string]bool{},
	}
	var err error
	if l.services, err = agenttest.NewAuthority("services", time.Now()); err != nil {
		t.Fatal(err)
	}
	if l.nodes, err = agenttest.NewAuthority("nodes", time.Now()); err != nil {
		t.Fatal(err)
	}
	signer := l.services
	if foreign {
		if signer, err = agenttest.NewAuthority("man in the middle", time.Now()); err != nil {
			t.Fatal(err)
		}
	}
	pair, err := signer.Pair(pki.ServiceID(agenttest.TrustDomain, serverName), time.Now().Add(-time.Hour),
		time.Now().Add(500*time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	path, service := recoveryv1connect.NewEnrollmentServiceHandler(l)
	mux := http.NewServeMux()
	mux.Handle(path, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if l.handler != nil {
			l.handler.ServeHTTP(w, r)
			return
		}
		service.ServeHTTP(w, r)
	}))
	l.server = &http.Server{
		Handler: mux,
		TLSConfig: &tls.Config{
			MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{*pair},
			NextProtos: []string{"h2"},
		}, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0), ReadHeaderTimeout: time.Second,
	}
	go func() { _ = l.server.ServeTLS(l.pipe, "", "") }()

	bundle := t.TempDir()
	for name, content := range map[string]string{
		"node-agent.env":         "GPUAAS_RECOVERY_API_URL=https://enrol:1\nGPUAAS_ENROLLMENT_TOKEN=" + token + "\n",
		"recovery-ca-bundle.crt": string(l.services.PEM()),
	} {
		if err := os.WriteFile(filepath.Join(bundle, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	root := t.TempDir()
	h := &host{
		listener: l, dirs: identity.Dirs{Etc: filepath.Join(root, "etc"), State: filepath.Join(root, "state")},
		log: &bytes.Buffer{},
	}
	h.dial = l.pipe.dial
	h.open()
	given, err := identity.ReadBundle(bundle)
	if err == nil {
		err = h.store.InstallBundle(given)
	}
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func (h *host) open() {
	h.t.Helper()
	var err error
	if h.store, err = identity.Open(h.dirs); err != nil {
		h.t.Fatal(err)
	}
}

func (h *host) enroller() *enrol.Enroller {
	h.t.Helper()
	e, err := enrol.New(enrol.Deps{
		Logger: slog.New(slog.NewJSONHandler(h.log, nil)), Store: h.store, Clock: clock.New(0), Dial: h.dial,
		Facts: func() enrol.Facts { return enrol.Facts{AgentVersion: "test", CorrelationID: "correlation"} },
		Record: func(_ context.Context, code commonv1.DiagnosticCode, detail string, _ time.Duration) (diag.Entry,
			error,
		) {
			h.codes = append(h.codes, code)
			h.at = append(h.at, time.Now())
			if strings.Contains(detail, "canary") {
				h.t.Errorf("the token is in a diagnostic: %s", detail)
			}
			return diag.Entry{}, nil
		},
	}, enrol.Config{})
	if err != nil {
		h.t.Fatal(err)
	}
	return e
}

func (h *host) end() {
	h.t.Helper()
	_ = h.server.Close()
	_ = h.pipe.Close()
	if err := h.store.Close(); err != nil {
		h.t.Error(err)
	}
	if strings.Contains(h.log.String(), "canary") {
		h.t.Errorf("the token is in the log: %s", h.log)
	}
}

func TestEnrols(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, "recovery", false)
		defer h.end()
		if err := h.enroller().Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		node, ok := h.store.Node()
		if !ok || node.NodeID != h.nodeID || h.store.Certificate() == nil ||
			h.store.Env().Get("GPUAAS_API_URL") != "nodeapi:1" {
			t.Errorf("node %+v", node)
		}
		if h.store.Token() != "" {
			t.Error("the token is still there")
		}
	})
}

// TestLostAnswersKeepTheKey crashes the host or loses the answer, again and again: the control plane sees one key.
func TestLostAnswersKeepTheKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, "recovery", false)
		defer h.end()
		h.answer = func(n int, ok *recoveryv1.EnrollResponse) (*recoveryv1.EnrollResponse, error) {
			if n < 4 {
				return nil, connect.NewError(connect.CodeUnavailable, errors.New("lost"))
			}
			return ok, nil
		}
		for range 2 { // a process that ends while it retries
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			_ = h.enroller().Run(ctx)
			cancel()
			if err := h.store.Close(); err != nil {
				t.Fatal(err)
			}
			h.open()
		}
		if err := h.enroller().Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		if len(h.keys) != 1 || len(h.calls) != 5 {
			t.Errorf("%d keys in %d calls", len(h.keys), len(h.calls))
		}
	})
}

func TestRefusals(t *testing.T) {
	tests := []struct {
		name  string
		err   error
		stop  bool
		least time.Duration // between two requests
		most  time.Duration
		code  commonv1.DiagnosticCode
	}{
		{
			name: "wait", err: fault.New(commonv1.Reason_REASON_MINT_CONSUMED, "", fault.RetryAfter(10*time.Second)),
			least: 10 * time.Second, most: 41 * time.Second, code: commonv1.DiagnosticCode_DIAGNOSTIC_CODE_ENROLLMENT_REFUSED,
		},
		{
			name: "rebundle", err: fault.New(commonv1.Reason_REASON_TOKEN_EXPIRED, "", fault.RetryAfter(time.Minute)),
			least: 90 * time.Second, most: 2 * time.Minute, code: commonv1.DiagnosticCode_DIAGNOSTIC_CODE_ENROLLMENT_REFUSED,
		},
		{name: "stop", err: fault.New(commonv1.Reason_REASON_EPOCH_SUPERSEDED, ""), stop: true},
		{
			name: "unknown", err: errors.New("boom"), most: 36 * time.Second,
			code: commonv1.DiagnosticCode_DIAGNOSTIC_CODE_RECOVERY_ENROLLMENT_BLOCKED,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHost(t, "recovery", false)
				defer h.end()
				h.answer = func(int, *recoveryv1.EnrollResponse) (*recoveryv1.EnrollResponse, error) {
					return nil, fault.ToConnect(tt.err, "")
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				err := h.enroller().Run(ctx)
				if _, stopped := errors.AsType[*enrol.StopError](err); stopped != tt.stop {
					t.Fatalf("Run = %v", err)
				}
				if tt.stop {
					return
				}
				for i := 1; i < len(h.calls); i++ {
					if wait := h.calls[i].Sub(h.calls[i-1]); wait < tt.least || wait > tt.most {
						t.Errorf("wait %d = %v", i, wait)
					}
				}
				if h.codes[0] != tt.code || len(h.codes) < len(h.calls)-1 || len(h.keys) != 1 {
					t.Errorf("codes %v for %d calls with %d keys", h.codes[:1], len(h.calls), len(h.keys))
				}
			})
		})
	}
}

func TestTokenGoesOnlyToThePinnedRecovery(t *testing.T) {
	for name, host := range map[string]func(t *testing.T) *host{
		"another authority": func(t *testing.T) *host { t.Helper(); return newHost(t, "recovery", true) },
		"another service":   func(t *testing.T) *host { t.Helper(); return newHost(t, "nodeapi", false) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := host(t)
				defer h.end()
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				if err := h.enroller().Run(ctx); !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("Run = %v", err)
				}
				if len(h.calls) != 0 {
					t.Error("the token left")
				}
				want := commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SERVER_TLS_UNTRUSTED
				if name == "another service" {
					want = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SERVER_NAME_MISMATCH
				}
				if h.codes[0] != want {
					t.Errorf("code %v", h.codes[0])
				}
			})
		})
	}
}

func TestEdgePagesAreRecognisedAndLeftAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, "recovery", false)
		defer h.end()
		n := 0
		h.handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			n++
			w.Header().Set("Content-Type", "text/html")
			w.Header().Set("Retry-After", "120")
			w.WriteHeader(http.StatusTooManyRequests)
			_, _ = io.WriteString(w, "<html>slow down</html>")
		})
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		_ = h.enroller().Run(ctx)
		if n < 20 || n > 31 {
			t.Errorf("%d requests in an hour of Retry-After 120", n)
		}
		if h.codes[0] != commonv1.DiagnosticCode_DIAGNOSTIC_CODE_EDGE_RATE_LIMITED {
			t.Errorf("code %v", h.codes[0])
		}
	})
}

func TestWithoutATokenItWaitsForABundle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, "recovery", false)
		defer h.end()
		path := filepath.Join(h.dirs.Etc, "node-agent.env")
		with, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte("GPUAAS_RECOVERY_API_URL=https://enrol:1\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := h.store.ReloadEnv(); err != nil {
			t.Fatal(err)
		}
		go func() {
			time.Sleep(10 * time.Minute)
			_ = os.WriteFile(path, with, 0o600)
		}()
		begin := time.Now()
		if err := h.enroller().Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(begin); took < 10*time.Minute || took > 12*time.Minute {
			t.Errorf("enrolled after %v", took)
		}
		if h.codes[0] != commonv1.DiagnosticCode_DIAGNOSTIC_CODE_RECOVERY_ENROLLMENT_BLOCKED {
			t.Errorf("code %v", h.codes[0])
		}
	})
}

// TestANewAddressIsTriedBeforeItReplacesOneThatWorks: a node that recovers its identity keeps an endpoint that answers
// where that of the reply does not, whatever trust comes with it.
func TestANewAddressIsTriedBeforeItReplacesOneThatWorks(t *testing.T) {
	for name, tt := range map[string]struct {
		dead  []string
		taken bool
	}{
		"both answer": {nil, true}, "the new one does not": {[]string{"new:1"}, false},
		"neither does": {[]string{"new:1", "old:1"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHost(t, "nodeapi", false) // the service that answers at every address here
				defer h.end()
				dial := h.dial
				h.dial = func(ctx context.Context, network, address string) (net.Conn, error) {
					if slices.Contains(tt.dead, address) {
						return nil, errors.New("connection refused")
					}
					return dial(ctx, network, address)
				}
				for file, content := range map[string][]byte{
					"ca-bundle.crt": h.services.PEM(),
					"node-agent.env": []byte(
						"GPUAAS_API_URL=old:1\nGPUAAS_RECOVERY_API_URL=https://enrol:1\nGPUAAS_ENROLLMENT_TOKEN=" + token + "\n",
					),
				} {
					if err := os.WriteFile(filepath.Join(h.dirs.Etc, file), content, 0o600); err != nil {
						t.Fatal(err)
					}
				}
				if err := h.store.ReloadEnv(); err != nil {
					t.Fatal(err)
				}
				answer := &recoveryv1.EnrollResponse{Profile: &commonv1.Profile{ApiUrl: "new:1", CaBundlePem: h.services.PEM()}}
				h.enroller().KeepWhatWorks(t.Context(), answer)
				if taken := answer.GetProfile().GetApiUrl() != ""; taken != tt.taken || (len(h.codes) == 0) != tt.taken {
					t.Errorf("taken %v, codes %v", taken, h.codes)
				}
			})
		})
	}
}

// TestNewTrustIsTriedBeforeItReplacesWhatWorks: the reply brings a bundle that does not verify the server at the
// address in the same reply.
func TestNewTrustIsTriedBeforeItReplacesWhatWorks(t *testing.T) {
	for name, good := range map[string]bool{"works": true, "does not": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHost(t, "nodeapi", false) // the service that answers at every address here
				defer h.end()
				etc := h.dirs.Etc
				other, err := agenttest.NewAuthority("another", time.Now())
				if err != nil {
					t.Fatal(err)
				}
				old := append(h.services.PEM(), other.PEM()...)
				for file, content := range map[string][]byte{
					"ca-bundle.crt": old,
					"node-agent.env": []byte(
						"GPUAAS_API_URL=old:1\nGPUAAS_RECOVERY_API_URL=https://enrol:1\nGPUAAS_ENROLLMENT_TOKEN=" + token + "\n",
					),
				} {
					if err := os.WriteFile(filepath.Join(etc, file), content, 0o600); err != nil {
						t.Fatal(err)
					}
				}
				if err := h.store.ReloadEnv(); err != nil {
					t.Fatal(err)
				}
				fresh := other.PEM()
				if good {
					fresh = h.services.PEM()
				}
				answer := &recoveryv1.EnrollResponse{Profile: &commonv1.Profile{ApiUrl: "new:1", CaBundlePem: fresh}}
				h.enroller().KeepWhatWorks(t.Context(), answer)
				if taken := answer.GetProfile().GetApiUrl() != ""; taken != good {
					t.Errorf("taken %v", taken)
				}
				if (len(h.codes) == 0) != good {
					t.Errorf("codes %v", h.codes)
				}
			})
		})
	}
}
