package agent_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/mesh/agent"
	"github.com/gpuaas/mesh/agent/agenttest"
	"github.com/gpuaas/mesh/agent/identity/envfile"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/testkit"
)

// distrust has the ingress trust another authority alone, so that it refuses every certificate issued before.
func (m *mesh) distrust() {
	m.t.Helper()
	other, err := agenttest.NewAuthority("others", time.Now())
	if err != nil {
		m.t.Fatal(err)
	}
	m.mu.Lock()
	m.nodes = other
	m.mu.Unlock()
	m.grpcServer.Stop()
	m.serveNodes()
}

func refusedSoon(cfg agent.Config) agent.Config {
	cfg.Session.RefusedFor, cfg.Session.RefusedSpread = 50*time.Millisecond, 50*time.Millisecond
	return cfg
}

// TestACertificateOfARetiredIssuerIsRecovered checks that an agent recovers whose certificate a real TLS listener
// refuses, and not while the control plane answers that it issues nothing.
func TestACertificateOfARetiredIssuerIsRecovered(t *testing.T) {
	m := newMesh(t)
	cfg := refusedSoon(config(t.TempDir()))
	enrolled(t, m, cfg)
	before, err := os.ReadFile(filepath.Join(cfg.EtcDir, "cert.pem"))
	if err != nil {
		t.Fatal(err)
	}
	m.distrust()
	setAPI(t, cfg, m.api)
	m.mu.Lock()
	m.enrolFail = fault.New(commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE, "",
		fault.RetryAfter(time.Millisecond))
	m.mu.Unlock()
	end, _ := run(t, open(t, cfg))
	testkit.Eventually(t, testkit.Patience, func() error {
		if n := len(m.recoveries()); n < 8 {
			return fmt.Errorf("%d recoveries", n)
		}
		return nil
	})
	m.mu.Lock()
	m.enrolFail = nil
	m.mu.Unlock()
	m.wait("admitted")
	r := m.lastHello().GetRecovery()
	if r.GetSuccesses() != 1 || r.GetFailures() < 8 || r.GetSuppressed() != 0 || m.instances != 1 {
		t.Errorf("reported %v, %d instances", r, m.instances)
	}
	if kept, err := os.ReadFile(filepath.Join(cfg.EtcDir, "cert-next.pem")); err != nil || !bytes.Equal(kept, before) {
		t.Errorf("the former certificate is not kept (%v)", err)
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
}

// TestAnIngressThatRefusesEverythingTakesNoIdentity checks that an agent makes one recovery and no more while an
// ingress refuses every certificate, and that once the ingress is repaired the node is back with the certificate that
// it had before, whatever became of the fresh one.
func TestAnIngressThatRefusesEverythingTakesNoIdentity(t *testing.T) {
	m := newMesh(t)
	cfg := refusedSoon(config(t.TempDir()))
	enrolled(t, m, cfg)
	trusted := m.nodes
	m.distrust() // its listener refuses what either authority signs
	m.mu.Lock()
	m.nodes = trusted
	m.mu.Unlock()
	setAPI(t, cfg, m.api)
	end, _ := run(t, open(t, cfg))
	detail := diagnosed(t, cfg, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_RECOVERY_ENROLLMENT_BLOCKED, 4)
	if !strings.Contains(detail, "suppressed") {
		t.Errorf("detail %q", detail)
	}
	if n := len(m.recoveries()); n != 1 {
		t.Errorf("%d recoveries", n)
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
	m.grpcServer.Stop()
	m.serveNodes()
	setAPI(t, cfg, m.api)
	end, _ = run(t, open(t, cfg))
	m.wait("admitted")
	if n := len(m.recoveries()); n != 1 || m.instances != 1 {
		t.Errorf("%d recoveries, %d instances", n, m.instances)
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
}

// setAPI changes the address of the node API on the host.
func setAPI(t *testing.T, cfg agent.Config, address string) {
	t.Helper()
	path := filepath.Join(cfg.EtcDir, "node-agent.env")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	env, err := envfile.Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, env.With(envfile.APIURL, address).Render(), 0o600); err != nil {
		t.Fatal(err)
	}
}
