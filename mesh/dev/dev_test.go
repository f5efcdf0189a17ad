package dev_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/devstack/inuse"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	settings "github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/dev"
	"github.com/gpuaas/mesh/mesh/material"
	"github.com/gpuaas/mesh/mesh/meshtest"
	"github.com/gpuaas/mesh/mesh/reap"
)

// text is written by the mesh and read by the test.
type text struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (w *text) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.buf.Write(p)
}

func (w *text) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.buf.String()
}

// started is a mesh that runs.
type started struct {
	*dev.Mesh

	out, err *text
	stop     func() error
}

func config(t *testing.T) dev.Config {
	t.Helper()
	const anyPort = "127.0.0.1:0"
	return dev.Config{
		Nodes: 1, AgentBinary: filepath.Join(meshtest.Programs(t), agents.Program), NoDemo: true,
		ConsoleAddr: anyPort, NodeAddr: anyPort, EnrollAddr: anyPort, MetricsAddr: anyPort,
	}
}

// migrated returns a data directory whose database has its schema already, for meshes of tests that are about something
// else: a start makes it in two seconds of processor time.
func migrated(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(meshtest.Dir(t), "data")
	meshtest.Postgres(t, filepath.Join(dir, "postgres"))
	return dir
}

// start runs a mesh until the test stops it, and returns when it is ready.
func start(t *testing.T, cfg dev.Config) started {
	t.Helper()
	return startLogging(t, cfg, testkit.Logger(t))
}

// startLogging does the same as start with a logger of the test's own.
func startLogging(t *testing.T, cfg dev.Config, logger *slog.Logger) started {
	t.Helper()
	ctx, cancel := context.WithCancel(testkit.Context(t))
	s := started{out: &text{}, err: &text{}}
	m, err := dev.New(ctx, dev.Deps{Logger: logger, Out: s.out, Err: s.err, Version: "test"}, cfg)
	if err != nil {
		cancel()
		t.Fatal(err)
	}
	s.Mesh = m
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	s.stop = sync.OnceValue(func() error {
		cancel()
		return <-ended
	})
	t.Cleanup(func() {
		if err := s.stop(); err != nil {
			t.Errorf("stop: %v", err)
		}
	})
	select {
	case <-m.Ready():
	case err := <-ended:
		t.Fatalf("the mesh ended: %v", err)
	case <-time.After(2 * time.Minute):
		t.Fatal("the mesh is not ready after two minutes")
	}
	return s
}

func (s started) node(t *testing.T, name string) *readmodelv1.Node {
	t.Helper()
	resp, err := s.Client().Query.GetNode(t.Context(), &readmodelv1.GetNodeRequest{Node: name})
	if err != nil {
		t.Fatal(err)
	}
	return resp.GetNode()
}

// await waits for the state of a workspace.
func (s started) await(t *testing.T, workspace string, want commonv1.WorkspaceState) *readmodelv1.Workspace {
	t.Helper()
	var ws *readmodelv1.Workspace
	testkit.Eventually(t, testkit.Patience, func() error {
		resp, err := s.Client().Query.GetWorkspace(t.Context(), &readmodelv1.GetWorkspaceRequest{Workspace: workspace})
		if err != nil {
			return err
		}
		if ws = resp.GetWorkspace(); ws.GetState() != want {
			return errors.New(workspace + " is " + names.Of(ws.GetState()) + " " + ws.GetLastError())
		}
		return nil
	})
	return ws
}

// handshakes reads from the metrics how many TLS handshakes each service's internal port has finished.
func handshakes(t *testing.T, s started) map[string]float64 {
	t.Helper()
	families, err := s.Registry().Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for _, f := range families {
		if f.GetName() != "gpuaas_tls_handshakes_total" {
			continue
		}
		for _, m := range f.GetMetric() {
			labels := map[string]string{}
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			if labels["port"] == "internal" {
				out[labels["service"]] += m.GetCounter().GetValue()
			}
		}
	}
	return out
}

// holdsFewSessions checks that the services of one process number and listen over connections that they share, and that
// the connections that only the start needed are released.
func holdsFewSessions(t *testing.T, s started) {
	t.Helper()
	url, err := settings.SecretFile(material.Layout{Dir: filepath.Join(s.Dir(), "material")}.URLFile(pg.RoleOwner)).Read()
	if err != nil {
		t.Fatal(err)
	}
	db, err := pg.Open(t.Context(), pg.Config{URL: url.Reveal(), ApplicationName: "test", MaxConns: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	testkit.Eventually(t, 4*testkit.Patience, func() error {
		var all, sequencers int
		if err := db.QueryRow(t.Context(), `
			SELECT count(*), count(*) FILTER (WHERE usename = 'sequencer')
			FROM pg_stat_activity WHERE datid IS NOT NULL AND pid <> pg_backend_pid()`).Scan(&all, &sequencers); err != nil {
			return err
		}
		if sequencers > 3 || all > 24 {
			return fmt.Errorf("the mesh holds %d connections, %d of them as sequencer, want at most 24 and 3", all, sequencers)
		}
		return nil
	})
}

func TestOneProcessHoldsAWholeMesh(t *testing.T) {
	testkit.IO(t)
	cfg := config(t)
	cfg.Ephemeral, cfg.NoDemo = true, false
	cfg.IdleConns = 20 * time.Second // in place of a minute, and longer than the services rest between two uses
	s := start(t, cfg)
	if took := s.Took(); took <= 0 {
		t.Errorf("took %s", took)
	}
	node := s.node(t, "n1")
	if !node.GetConnected() || node.GetIdentity().GetState() != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE {
		t.Errorf("node %v", node)
	}
	ws := s.await(t, "acme/demo", commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE)
	if len(ws.GetEndpoints()) == 0 {
		t.Error("the demo answers nowhere")
	}
	// Each of the others has shaken hands with both services that are called, as it would from a process of its own.
	counts := handshakes(t, s)
	for _, service := range []string{"recovery", "lifecycle"} {
		if counts[service] < 3 {
			t.Errorf("%s has finished %v handshakes, want one with each of its three callers", service, counts[service])
		}
	}
	for _, want := range []string{"fsync=on", "1 of 1 agents connected", "Console:   not built"} {
		if !strings.Contains(s.out.String(), want) {
			t.Errorf("output lacks %q: %s", want, s.out.String())
		}
	}
	if !strings.Contains(s.err.String(), "ready in ") {
		t.Errorf("no ready line: %q", s.err.String())
	}
	holdsFewSessions(t, s)
	dir := s.Dir()
	began := time.Now()
	if err := s.stop(); err != nil {
		t.Fatal(err)
	}
	// The group has 20 s, the servers' end 20. A task that hangs is an error of stop.
	if took := time.Since(began); took > 41*time.Second {
		t.Errorf("stopping took %s", took)
	}
	if procs, err := reap.Under(dir, agents.Program); err != nil || len(procs) > 0 {
		t.Errorf("left running: %v, %v", procs, err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("left behind: %s (%v)", dir, err)
	}
}

func TestASecondStartFindsWhatTheFirstLeft(t *testing.T) {
	testkit.IO(t)
	cfg := config(t)
	cfg.DataDir, cfg.NoDemo = filepath.Join(meshtest.Dir(t), "data"), false
	first := start(t, cfg)
	before := first.node(t, "n1")
	ws := first.await(t, "acme/demo", commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE)

	if _, err := dev.New(t.Context(), dev.Deps{Logger: testkit.Logger(t), Out: &text{}, Err: &text{}},
		cfg); !errors.Is(err, dev.ErrInUse) ||
		!strings.Contains(err.Error(), strconv.Itoa(os.Getpid())) {
		t.Errorf("a second mesh on the directory: %v", err)
	}
	if err := first.stop(); err != nil {
		t.Fatal(err)
	}
	second := start(t, cfg)
	after := second.node(t, "n1")
	if after.GetNodeId() != before.GetNodeId() ||
		after.GetIdentity().GetNodeInstanceId() != before.GetIdentity().GetNodeInstanceId() {
		t.Errorf("the node was %v and is %v", before.GetIdentity(), after.GetIdentity())
	}
	again := second.await(t, "acme/demo", commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE)
	if again.GetWorkspaceId() != ws.GetWorkspaceId() || again.GetEpoch() != ws.GetEpoch() {
		t.Errorf("the workspace was %s in epoch %d and is %s in epoch %d", ws.GetWorkspaceId(), ws.GetEpoch(),
			again.GetWorkspaceId(), again.GetEpoch())
	}
	// Its instance was powered on again, and finds the mesh although its ports are different now.
	instance := again.GetNodeName()
	testkit.Eventually(t, testkit.Patience, func() error {
		if !second.node(t, instance).GetConnected() {
			return errors.New("the box is not connected")
		}
		return nil
	})
	// All of it was ended with the first mesh. Its workload is started again since the second lists its epoch.
	if len(again.GetEndpoints()) == 0 {
		t.Fatal("the workspace has no endpoint")
	}
	testkit.Eventually(t, 2*time.Minute, func() error {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, again.GetEndpoints()[0].GetUrl(), nil)
		if err != nil {
			return err
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		if err := resp.Body.Close(); err != nil || resp.StatusCode != http.StatusOK {
			return errors.Join(err, fmt.Errorf("its endpoint answers %s", resp.Status))
		}
		return nil
	})
}

// TestThePolicyFileIsReportedAsAnyOtherChange: the event log has the values that a file set, and a start with the same
// file changes nothing.
func TestThePolicyFileIsReportedAsAnyOtherChange(t *testing.T) {
	cfg := config(t)
	cfg.Nodes, cfg.DataDir = 0, migrated(t)
	cfg.PolicyFile = filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(cfg.PolicyFile, []byte("saga.retry_limit: 2\nnode.stream_max_age_seconds: 1800\n"),
		0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		s := start(t, cfg)
		pool := recoveryPool(t, s)
		var reported []string
		for _, e := range testkit.Events(t, pool, `kind = 'policy.changed'`) {
			reported = append(reported, fmt.Sprintf("%s=%s v%d by %s", e.AggregateID, e.Text("value"), e.AggregateVersion,
				e.Text("updated_by")))
		}
		pool.Close()
		if want := "node.stream_max_age_seconds=1800 v1 by dev, saga.retry_limit=2 v1 by dev"; strings.Join(reported,
			", ") != want {
			t.Fatalf("reported %q, want %q", reported, want)
		}
		if err := s.stop(); err != nil {
			t.Fatal(err)
		}
	}
}

// Scenario: a mesh starts in rollback mode with a policy file whose value is not the stored one. It starts with the
// stored value, so that the rollback can be accepted; the start after that has the value of the file.
func TestThePolicyFileWaitsForTheAcceptanceOfARollback(t *testing.T) {
	cfg := config(t)
	cfg.Nodes, cfg.DataDir = 0, migrated(t)
	cfg.PolicyFile = filepath.Join(t.TempDir(), "policy.yaml")
	stored := func(s started) string {
		got, err := s.Client().Query.GetPolicy(t.Context(), &readmodelv1.GetPolicyRequest{Key: policy.SagaRetryLimit})
		if err != nil || len(got.GetItems()) != 1 {
			t.Fatalf("policy: %v, %v", got, err)
		}
		return got.GetItems()[0].GetValue()
	}
	for round, values := range []struct{ file, want string }{{"2", "2"}, {"4", "2"}, {"4", "4"}} {
		if err := os.WriteFile(cfg.PolicyFile, []byte("saga.retry_limit: "+values.file+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		s := start(t, cfg)
		if got := stored(s); got != values.want {
			t.Fatalf("start %d: %s is stored, want %s", round+1, got, values.want)
		}
		var err error
		switch round {
		case 0:
			pool := recoveryPool(t, s)
			_, err = pool.Exec(t.Context(),
				`UPDATE recovery.rollback SET state = 'active', since = mesh.clock(), version = version + 1`)
			pool.Close()
		case 1:
			_, err = s.Client().Rollback.AcceptRollback(t.Context(),
				&readmodelv1.AcceptRollbackRequest{Reason: "compared"})
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := s.stop(); err != nil {
			t.Fatal(err)
		}
	}
}

// recoveryPool returns a pool of connections to a mesh's database as recovery.
func recoveryPool(t *testing.T, s started) *pgxpool.Pool {
	t.Helper()
	raw, err := os.ReadFile(material.Layout{Dir: filepath.Join(s.Dir(), "material")}.URLFile(pg.RoleRecovery))
	if err != nil {
		t.Fatal(err)
	}
	pool, err := pg.Open(t.Context(), pg.Config{URL: strings.TrimSpace(string(raw)), MaxConns: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

func TestWhatCannotStartSaysWhy(t *testing.T) {
	testkit.IO(t)
	deps := dev.Deps{Logger: testkit.Logger(t), Out: &text{}, Err: &text{}}
	taken, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()

	cfg := config(t)
	cfg.DataDir = filepath.Join(meshtest.Dir(t), "data")
	cfg.ConsoleAddr, cfg.MetricsAddr = taken.Addr().String(), taken.Addr().String()
	_, err = dev.New(t.Context(), deps, cfg)
	var inUse *inuse.Error
	if !errors.As(err, &inUse) || inUse.Flag != "--console-addr" || inUse.PID != os.Getpid() {
		t.Errorf("a taken address: %v", err)
	}
	if !strings.Contains(err.Error(), "--metrics-addr") {
		t.Errorf("only the first problem was told: %v", err)
	}

	file := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(file, []byte("node.no_such_key: 1\nnode.stream_max_age_seconds: -5\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = dev.New(t.Context(), deps,
		dev.Config{PolicyFile: file, Nodes: -1, AgentBinary: "/nonexistent", NodeAddr: "nowhere"})
	var wrong *dev.ConfigError
	if !errors.As(err, &wrong) {
		t.Fatalf("a bad configuration: %v", err)
	}
	for _, want := range []string{
		"node.no_such_key", "node.stream_max_age_seconds", "--nodes", "--agent-binary",
		"--node-addr",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not told: %v", want, err)
		}
	}
}
