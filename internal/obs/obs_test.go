package obs_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/obs/obstest"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func logLine(t *testing.T, log func(*slog.Logger)) (map[string]any, string) {
	t.Helper()
	var buf bytes.Buffer
	logger, err := obs.NewLogger(&buf, obs.LogConfig{Level: "debug"})
	if err != nil {
		t.Fatal(err)
	}
	log(logger)
	var line map[string]any
	if err := json.Unmarshal(buf.Bytes(), &line); err != nil {
		t.Fatalf("%v in %s", err, buf.String())
	}
	delete(line, "time")
	return line, buf.String()
}

func TestCorrelationReachesTheLine(t *testing.T) {
	ctx := obs.With(t.Context(), obs.Correlation{CorrelationID: "c", NodeID: "n", WorkspaceID: "w"})
	ctx = obs.With(ctx, obs.Correlation{TaskID: "t", WorkspaceID: "w2"})
	if want := (obs.Correlation{CorrelationID: "c", NodeID: "n", WorkspaceID: "w2", TaskID: "t"}); obs.From(ctx) != want {
		t.Errorf("From() = %+v", obs.From(ctx))
	}
	line, _ := logLine(t, func(l *slog.Logger) { l.InfoContext(ctx, "task leased", slog.Int("count", 1)) })
	want := map[string]any{
		"level": "INFO", "msg": "task leased", "count": 1.0, "correlation_id": "c", "node_id": "n",
		"workspace_id": "w2", "task_id": "t",
	}
	if diff := cmp.Diff(want, line); diff != "" {
		t.Error(diff)
	}
	_, raw := logLine(t, func(l *slog.Logger) {
		l.With(slog.String("node_id", "mine")).InfoContext(ctx, "x", slog.String("task_id", "own"))
	})
	if strings.Count(raw, `"node_id"`) != 1 || strings.Count(raw, `"task_id"`) != 1 || !strings.Contains(raw, "mine") ||
		!strings.Contains(raw, "own") {
		t.Errorf("doubled or lost ids: %s", raw)
	}
	if (obs.From(t.Context()) != obs.Correlation{}) {
		t.Error("an empty context has a correlation")
	}
}

func TestKeysMatchTheSharedSpelling(t *testing.T) {
	var got []string
	for _, a := range (obs.Correlation{"1", "2", "3", "4", "5", "6", "7", "8"}).Attrs() {
		got = append(got, a.Key)
	}
	want := []string{
		"correlation_id", "tenant_id", "workspace_id", "workflow_id", "allocation_id", "task_id", "node_id",
		"node_instance_id",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestSecretsDoNotReachTheLog(t *testing.T) {
	const canary = "CANARYc4n4ry"
	jwt := "eyJhbGciOiJFZERTQSJ9.eyJzdWIiOiI" + canary + "In0.c2lnbmF0dXJl" + canary
	for name, attr := range map[string]slog.Attr{
		"key name":       slog.String("recovery_token", canary),
		"authorization":  slog.String("authorization", canary),
		"bearer":         slog.String("header", "Authorization: Bearer "+canary),
		"jwt":            slog.String("note", "got "+jwt+" here"),
		"url password":   slog.String("target", "postgres://user:"+canary+"@host/db"),
		"query string":   slog.String("url", "https://host/path?ticket="+canary+"&x=1"),
		"assignment":     slog.String("stderr", "GPUAAS_ENROLLMENT_TOKEN="+canary),
		"private key":    slog.String("pem", "-----BEGIN EC PRIVATE KEY-----\n"+canary+"\n-----END EC PRIVATE KEY-----"),
		"type":           slog.Any("value", obs.Secret(canary)),
		"error text":     obs.Err(fmt.Errorf("dial postgres://u:%s@h/d: refused", canary)),
		"error as value": slog.Any("cause", errors.New("password="+canary)),
		"struct":         slog.Any("config", struct{ Password obs.Secret }{canary}),
	} {
		if _, raw := logLine(t, func(l *slog.Logger) { l.Info("x", attr) }); strings.Contains(raw, canary) {
			t.Errorf("%s: the secret is in %s", name, raw)
		}
	}
	if s := fmt.Sprintf("%v %s %#v %q", obs.Secret(canary), obs.Secret(canary), obs.Secret(canary),
		obs.Secret(canary)); strings.Contains(s, canary) {
		t.Errorf("fmt shows it: %s", s)
	}
	if obs.Secret(canary).Reveal() != canary {
		t.Error("Reveal lies")
	}
	for _, plain := range []string{"short", "an ordinary sentence about workspace demo2", "https://host:1/path"} {
		if got := obs.Redact(plain); got != plain {
			t.Errorf("Redact(%q) = %q", plain, got)
		}
	}
}

func TestErrAndReason(t *testing.T) {
	line, _ := logLine(t, func(l *slog.Logger) {
		err := fmt.Errorf("do: %w", fault.New(commonv1.Reason_REASON_CONFLICT, "lost",
			fault.Cause(errors.New("row changed"))))
		l.Info("x", obs.Err(err), obs.Reason(err), obs.Err(nil))
	})
	if line["error"] != "do: conflict: lost: row changed" || line["reason"] != "conflict" {
		t.Errorf("line %v", line)
	}
}

func TestLogConfig(t *testing.T) {
	for _, c := range []obs.LogConfig{{Level: "loud"}, {Format: "xml"}} {
		if _, err := obs.NewLogger(io.Discard, c); err == nil {
			t.Errorf("%+v: want an error", c)
		}
	}
	var buf bytes.Buffer
	logger, err := obs.NewLogger(&buf, obs.LogConfig{Format: "text", Level: "warn"})
	if err != nil {
		t.Fatal(err)
	}
	ctx := obs.With(t.Context(), obs.Correlation{NodeID: "n1"})
	logger.InfoContext(ctx, "hidden")
	logger.WarnContext(ctx, "shown", slog.String("launch_secret", "abc"))
	if s := buf.String(); strings.Contains(s, "hidden") || !strings.Contains(s, "node_id=n1") ||
		strings.Contains(s, "abc") {
		t.Errorf("text log %q", s)
	}
}

func TestRegistry(t *testing.T) {
	r, err := obs.NewRegistry()
	if err != nil {
		t.Fatal(err)
	}
	for _, service := range []string{"lifecycle", "recovery"} {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "refusals_total", Help: "Refusals by reason."},
			[]string{"reason"})
		if err := r.ForService(service).Register(c); err != nil {
			t.Fatal(err)
		}
		c.WithLabelValues(obs.ReasonLabel(commonv1.Reason_REASON_CONFLICT)).Inc()
		c.WithLabelValues(obs.ReasonLabel(4711)).Inc()
	}
	obstest.Lint(t, r.Gatherer())
}

func TestLintFindsProblems(t *testing.T) {
	r, err := obs.NewRegistry()
	if err != nil {
		t.Fatal(err)
	}
	bad := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "things", Help: "Things."}, []string{"node_id"})
	r.MustRegister(bad)
	bad.WithLabelValues("x").Inc()
	problems, err := obstest.Problems(r.Gatherer())
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Join(problems, "\n")
	if !strings.Contains(text, "node_id") || !strings.Contains(text, "_total") {
		t.Errorf("problems: %s", text)
	}
	for _, label := range []string{"correlation_id", "tenant", "hostname", "id"} {
		if !obs.ForbiddenLabel(label) {
			t.Errorf("label %s is allowed", label)
		}
	}
	for _, label := range []string{"reason", "service", "state", "method", "code"} {
		if obs.ForbiddenLabel(label) {
			t.Errorf("label %s is refused", label)
		}
	}
}

func TestOpsServer(t *testing.T) {
	testkit.IO(t)
	registry, err := obs.NewRegistry()
	if err != nil {
		t.Fatal(err)
	}
	health := obs.NewHealth()
	var dbErr error
	health.Ready("postgres", func(context.Context) error { return dbErr })
	health.Ready("recovery", func(context.Context) error { return nil })
	for _, addr := range []string{"127.0.0.1:0", "0.0.0.0:0"} {
		t.Run(addr, func(t *testing.T) {
			dbErr = nil
			dir, err := os.MkdirTemp("", "ops-*") //nolint:usetesting // the path of a socket must be short
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = os.RemoveAll(dir) })
			socket := filepath.Join(dir, "debug.sock")
			deps := obs.OpsDeps{Logger: slog.New(slog.DiscardHandler), Registry: registry, Health: health, DebugSocket: socket}
			srv, err := obs.NewOpsServer(t.Context(), deps, addr)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- srv.Run(ctx) }()
			_, port, _ := strings.Cut(strings.ReplaceAll(srv.Addr(), "[::]", "0.0.0.0"), ":")
			get := func(path string) (int, string) {
				t.Helper()
				req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://127.0.0.1:"+port+path, nil)
				if err != nil {
					t.Fatal(err)
				}
				resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = resp.Body.Close() }()
				body, err := io.ReadAll(resp.Body)
				if err != nil {
					t.Fatal(err)
				}
				return resp.StatusCode, string(body)
			}
			if code, body := get("/metrics"); code != http.StatusOK || !strings.Contains(body, "gpuaas_build_info{") {
				t.Errorf("metrics: %d", code)
			}
			if code, _ := get("/debug/pprof/"); code != http.StatusNotFound {
				t.Errorf("profiles on %s: %d", addr, code)
			}
			checkProfiles(t, socket)
			if _, err := obs.NewOpsServer(t.Context(), deps, "127.0.0.1:0"); err == nil ||
				!strings.Contains(err.Error(), "in use") {
				t.Errorf("a second process took the socket: %v", err)
			}
			if code, body := get("/readyz"); code != http.StatusOK || !strings.Contains(body, `"postgres"`) {
				t.Errorf("readyz: %d %s", code, body)
			}
			dbErr = fault.New(commonv1.Reason_REASON_UNAVAILABLE, "the database does not answer",
				fault.Cause(errors.New("SQLSTATE")))
			code, body := get("/readyz")
			if code != http.StatusServiceUnavailable || !strings.Contains(body, `"reason":"unavailable"`) ||
				strings.Contains(body, "SQLSTATE") {
				t.Errorf("readyz: %d %s", code, body)
			}
			if code, _ := get("/livez"); code != http.StatusOK {
				t.Errorf("a lost database kills the process: %d", code)
			}
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
}

// checkProfiles reads a profile over the socket, which only its owner may open.
func checkProfiles(t *testing.T, socket string) {
	t.Helper()
	info, err := os.Stat(socket)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("socket: %v %v", info, err)
	}
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		},
	}}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://debug/debug/pprof/goroutine?debug=1", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if body, err := io.ReadAll(resp.Body); err != nil || !strings.Contains(string(body), "goroutine profile") {
		t.Errorf("%s: %v", resp.Status, err)
	}
}

func TestHealthDrainAndSlowCheck(t *testing.T) { synctest.Test(t, healthDrainAndSlowCheck) }

func healthDrainAndSlowCheck(t *testing.T) {
	h := obs.NewHealth()
	h.Live("loop", func(context.Context) error { return nil })
	h.Ready("slow", func(ctx context.Context) error {
		<-ctx.Done()
		return ctx.Err()
	})
	r := h.ReadyReport(t.Context())
	if r.OK() || len(r.Checks) != 2 || r.Checks[0].Status != "ok" || !strings.Contains(r.Checks[1].Message, "no answer") {
		t.Errorf("report %+v", r)
	}
	h.Ready("slow", func(context.Context) error { return nil })
	if r := h.ReadyReport(t.Context()); !r.OK() {
		t.Errorf("report %+v", r)
	}
	h.Drain("")
	if r := h.ReadyReport(t.Context()); r.OK() || r.Draining != "shutting down" {
		t.Errorf("report %+v", r)
	}
	if r := h.LiveReport(t.Context()); !r.OK() {
		t.Errorf("draining is not dead: %+v", r)
	}
}
